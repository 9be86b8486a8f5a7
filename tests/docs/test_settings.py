"""The settings page is what the table of settings says, and every setting is fit to be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.cli.config import settings_page
from streams.config import SETTINGS, Setting

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_the_settings_page_is_not_stale() -> None:
    assert PAGE.read_text() == settings_page(), "run `make docs`"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_is_documented_and_can_be_typed_as_it_is_shown(setting: Setting) -> None:
    assert f"`{setting.variable}`" in PAGE.read_text()
    assert setting.help.endswith((".", ")"))
    if setting.kind != "secret":
        assert setting.parse(setting.show(setting.default)) == setting.default
    if setting.kind in ("count", "bytes", "ms"):
        assert setting.least <= setting.default <= setting.most
