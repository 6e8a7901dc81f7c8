"""``fastps doctor``: checks whether this machine is fit to run fastps, and how fast its parts are."""

from fastps.commands.doctor.doctor import Report, add_arguments, as_json, as_text, examine, execute, measure

__all__ = ["Report", "add_arguments", "as_json", "as_text", "examine", "execute", "measure"]
