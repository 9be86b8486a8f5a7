"""`streams completion`: print a shell completion script."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.verbs import example


@example("streams completion bash > streams-completion.bash")
@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(shell: str) -> None:
    """Print a completion script for SHELL. For bash: `streams completion bash >> ~/.bashrc`."""
    from click.shell_completion import get_completion_class

    from streams.cli import cli

    completion = get_completion_class(shell)
    assert completion is not None, "click supports every shell in the choice"
    output.print_text(completion(cli, {}, "streams", "_STREAMS_COMPLETE").source())
