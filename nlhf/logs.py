"""Progress and warnings on standard error, beside the path: one line each, without the libraries' chatter."""

import logging
import os
import sys
import warnings

_NOISY = ("httpx", "httpx2", "filelock", "urllib3", "datasets", "matplotlib", "fsspec")
_NAME = "nlhf"


def setup_logging() -> None:
    """Show what we log from level INFO and what libraries log from WARNING on; of several processes one shows INFO."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.get_name() == _NAME]:
        root.removeHandler(handler)
    handler = logging.StreamHandler()  # standard error as it is now
    handler.set_name(_NAME)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own and would say all twice
    # Every load and save of a model would draw a bar of its own. The variable is read when transformers is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if transformers := sys.modules.get("transformers"):
        transformers.utils.logging.disable_progress_bar()
    # transformers and trl call these deprecated names themselves.
    warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing", category=FutureWarning)
