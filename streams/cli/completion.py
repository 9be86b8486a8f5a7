"""`streams completion`: a script that lets a shell complete our commands."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.verbs import example


@example("streams completion bash > streams-completion.bash")
@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(shell: str) -> None:
    """Print a script for SHELL. For bash: `streams completion bash >> ~/.bashrc`."""
    from click.shell_completion import get_completion_class

    from streams.cli import cli

    found = get_completion_class(shell)
    assert found is not None, "click knows the shells that are offered"
    output.print_text(found(cli, {}, "streams", "_STREAMS_COMPLETE").source())
