"""apex's gradient scaler for models that are spread over ranks."""

from narrowcast.apex._model_parallel import GradScaler

__all__ = ["GradScaler"]
