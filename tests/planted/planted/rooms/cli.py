"""The command line, reports, what is shown, errors and metrics."""

from __future__ import annotations

from planted.fault import Fault

FAULTS = [
    Fault(
        "an-error-is-exit-code-0",
        "cli/app.py",
        "raise typer.Exit(2 if isinstance(error, InvalidArgumentError) else 1) from error",
        "raise typer.Exit(0) from error",
    ),
    Fault(
        "damage-that-verify-finds-is-exit-code-0",
        "cli/maintain.py",
        "    if not report.ok:\n",
        "    if False:\n",
    ),
    Fault(
        "conflicts-of-a-dry-run-are-exit-code-0",
        "cli/edits.py",
        "    if report.conflicts:\n",
        "    if False:\n",
    ),
    Fault(
        "a-place-of-no-use-is-exit-code-0",
        "cli/check.py",
        'if report.usable_for == "nothing":',
        "if False:",
    ),
    Fault(
        "a-dry-run-of-a-collection-deletes",
        "cli/maintain.py",
        "report = repo.garbage_collect(wait, dry_run=dry_run, progress=told)",
        "report = repo.garbage_collect(wait, progress=told)",
    ),
    Fault(
        "a-dry-run-of-a-cleaning-deletes",
        "cli/maintain.py",
        "report = repo.clean(kept, wait, dry_run=dry_run, progress=told)",
        "report = repo.clean(kept, wait, progress=told)",
    ),
    Fault(
        "a-dry-run-of-setting-back-sets-back",
        "cli/maintain.py",
        "report = zm.recover(repo, version, dry_run=dry_run)",
        "report = zm.recover(repo, version)",
    ),
    Fault(
        "a-dry-run-of-a-merge-merges",
        "cli/edits.py",
        "        dry_run=dry_run,\n",
        "",
    ),
    Fault(
        "a-moved-branch-drops-commits-unasked",
        "cli/ref_commands.py",
        "repo.reset_branch(name, version, force=force, expected=known)",
        "repo.reset_branch(name, version, force=True)",
    ),
    Fault(
        "values-of-options-are-in-errors",
        "cli/arguments.py",
        'raise InvalidArgumentError(f"{option} takes {form}, and each name once")',
        'raise InvalidArgumentError(f"{option} takes {form}, and each name once, not {one}")',
    ),
    Fault(
        "html-has-what-others-have-written-as-markup",
        "markup.py",
        "return escape(plain_text(value))",
        "return plain_text(value)",
    ),
    Fault(
        "text-may-be-turned-around-and-invisible",
        "plain.py",
        'return char.isprintable() or unicodedata.category(char) == "Zs"',
        'return char.isprintable() or unicodedata.category(char) in ("Zs", "Cf")',
    ),
    Fault(
        "more-than-the-limit-is-read",
        "cli/cat.py",
        "    if count > limit:\n",
        "    if False:\n",
    ),
    Fault(
        "counts-of-what-is-gone-are-lost",
        "metrics.py",
        "self.retired[name] += n",
        "pass",
    ),
]
