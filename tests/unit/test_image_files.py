"""What pictures become that are no plain RGB of 8 bits (slime.utils.processing_utils)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slime.utils.errors import UsageError
from slime.utils.processing_utils import encode_image_for_rollout_engine, open_image, process_vision_info


def saved(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_an_image_is_seen_as_people_see_it() -> None:
    wide = Image.new("RGB", (40, 20), "red")
    wide.paste("blue", (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # a phone held upright: turn it to the right
    photo = saved(wide, "JPEG", exif=exif, quality=100, subsampling=0)
    upright = open_image(photo)
    assert upright.size == (20, 40)
    (red, _, _), (_, _, blue) = upright.getpixel((10, 5)), upright.getpixel((10, 35))
    assert red > 240 and blue > 240, "the left half is on top"
    again = open_image(encode_image_for_rollout_engine(upright))
    assert again.tobytes() == upright.tobytes() and not again.getexif(), "an engine does not turn it once more"
    part = {"type": "image", "image": photo, "max_pixels": 200}
    (small,) = process_vision_info([{"content": [part]}], None)["images"]
    assert small.size == (10, 20)

    drawing = Image.new("RGBA", (4, 4), (0, 0, 0, 0))  # a black line on nothing
    drawing.putpixel((1, 1), (0, 0, 0, 255))
    found = open_image(saved(drawing))
    assert found.mode == "RGB" and found.getpixel((0, 0)) == (255, 255, 255) and found.getpixel((1, 1)) == (0, 0, 0)

    scan = Image.fromarray(np.array([[0, 257 * 7, 65535]], np.uint16))
    assert [open_image(saved(scan)).getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (7,) * 3, (255,) * 3]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (saved(Image.new("F", (2, 2)), "TIFF"), "mode F does not say which numbers are black and white"),
        (saved(Image.new("RGB", (2, 2)), "EPS"), "is a program .EPS., which is not run"),
        (saved(Image.new("RGB", (64, 64)))[:-20], "could not be read"),
    ],
)
def test_an_image_that_nobody_could_show_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_image(data)


def test_an_image_that_the_processor_does_not_take_is_named_when_its_row_is_drawn() -> None:
    class Narrow:
        def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> None:
            raise ValueError(f"aspect ratio of {image_sizes}")

    messages = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (5000, 3))}]}]
    with pytest.raises(UsageError, match=r"^image 1: the processor takes no image of 5000 x 3 pixels: .*\(3, 5000\)"):
        process_vision_info(messages, Narrow())
