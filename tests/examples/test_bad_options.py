"""Options that cannot be: one line on stderr that names the option, and exit code 2."""

import pytest
from example_runs import EXAMPLES, refused

WHOLE = "expected a whole number from 1 up, not"
NO_CHOICE = "invalid choice: "
OF_TWO_SPELLINGS = (
    "typical.py", "clipping.py", "accumulation.py", "gradient_penalty.py", "several_models.py",
    "data_parallel.py", "custom_function.py", "ddp.py",
)  # fmt: skip
CASES = {
    **{f"{script} --steps 0": WHOLE for script in OF_TWO_SPELLINGS},
    "typical.py --width -3": f"{WHOLE} -3",
    "typical.py --overflow-at x": f"{WHOLE} x",
    "typical.py --policy int8": f"{NO_CHOICE}'int8'",
    "typical.py --device nowhere": "expected a device of this machine, as cpu, not nowhere",
    "ddp.py --device nowhere": f"{NO_CHOICE}'nowhere'",
    "ddp.py --device cuda --processes 99": "expected a GPU for each of 99 processes",
    "clipping.py --max-norm 0": "expected a number above 0, not 0",
    "clipping.py --max-value nan": "expected a number above 0, not nan",
    "gradient_penalty.py --weight inf": "expected a number above 0, not inf",
    "accumulation.py --accumulate 0": f"{WHOLE} 0",
    "autocast_dtypes.py --size 0": f"{WHOLE} 0",
    "autocast_dtypes.py --dtype fp8": f"{NO_CHOICE}'fp8'",
    "gradient_histogram.py --scale 3": "expected a power of two, not 3",
    "gradient_histogram.py --normal 200": "expected a whole number from -120 to 100, not 200",
    "inference.py --passes 0": f"{WHOLE} 0",
    "loss_scaling.py --init-scale -1": "expected a number above 0, not -1",
    "step_by_step.py --scale 0": "expected a number above 0, not 0",
    "digits.py --epochs 0": f"{WHOLE} 0",
    "quantized_sine.py --levels 1": "expected a whole number from 2 up, not 1",
    "quantized_sine.py --size x": "invalid whole number value: 'x'",
    "transformers_text.py --hidden 65": "expected a multiple of 64, not 65",
    "transformers_digits.py --device nowhere": "expected a device such as cpu or cuda, not nowhere",
    "train_validate/main.py --size 30": "expected a multiple of 4 from 4 up, not 30",
    "train_validate/main.py --batch-size 900": "expected at most the 512 training images",
    "train_validate/main.py --policy bf61": "unknown policy 'bf61'. Did you mean \"bf16\"?",
    "train_validate/main.py --policy O2": "expected a policy that leaves them in fp32",
    "train_validate/main.py --scenario ../x": "expected letters, digits",
    "segment_recurrence/main.py --amp apex": f"{NO_CHOICE}'apex'",
    "segment_recurrence/main.py --width 6": "expected a multiple of 4, not 6",
    "segment_recurrence/main.py --batch-size 15": "expected a multiple of the 2 chunks of all ranks",
    "segment_recurrence/main.py --characters 2000": "expected at least 2640 for these segments and columns",
    "segment_recurrence/main.py --device gpu": "expected cpu or cuda, not gpu",
    "speech_style/main.py --clip -1": "expected a number above 0, not -1",
    "speech_style/main.py --learning-rate nan": "expected a number above 0, not nan",
    "speech_style/main.py --batch-size 41 --utterances 40": "expected at most the 40 utterances",
    "speech_style/main.py --master-weights --amp torch": "expected --amp apex or narrowcast",
}


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=[pytest.mark.long] * ("transformers" in words)) for words in CASES]
)
def test_bad_options_are_one_line(words):
    script, option, *rest = words.split()
    assert (EXAMPLES / script).is_file()
    device = [] if "--device" in words else ["--device", "cpu"]
    said = refused(script, *device, option, *rest)
    assert said.startswith(f"argument {option}: ")
    assert CASES[words] in said
