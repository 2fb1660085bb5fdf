"""Runs a script as a comparison does: ``attached.py SETTINGS SCRIPT ARGS...``, with SETTINGS as JSON."""

import json
import sys
from pathlib import Path

from narrowcast.attach import Attachment, FileWatch, Script, _stopping, run_attached
from narrowcast.observe.capture import CaptureWriter, start_event

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    script = Script.from_path(sys.argv[2], sys.argv[3:])
    folder = Path(settings["folder"])
    writer = CaptureWriter(folder / "capture.jsonl")
    writer.write(start_event(script.argv, settings["policy"]))
    _stopping._PATIENCE_S = settings["patience_s"]
    if settings["watch_files"]:
        FileWatch(folder / "files.jsonl", settings["earlier"], own=[folder]).install()
    attachment = Attachment(
        settings["policy"],
        writer=writer,
        stop_after=settings["stop_after"],
        seed_shift=settings["seed_shift"],
    )
    run_attached(script, attachment, at_end=lambda: (folder / "at_end").write_text("called"))
