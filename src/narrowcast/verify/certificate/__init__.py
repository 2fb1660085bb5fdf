"""The certificate: error over noise of each gradient, and its verdict."""
