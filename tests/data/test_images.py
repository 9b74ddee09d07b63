"""Images of all modes become upright RGB; what cannot be shown has a reason that names the file."""

import io

import numpy as np
import pytest
from PIL import Image
from train_data import deep_png, gigantic_png, image_bytes

from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import file_problems
from normalign_llava.data.rows.images import ImageRules, decode_image, image_problem
from normalign_llava.data.rows.zips import MAX_IMAGE_BYTES


pytestmark = pytest.mark.slow


def saved(image: Image.Image, form="PNG", **kwargs) -> dict:
    buffer = io.BytesIO()
    image.save(buffer, form, **kwargs)
    return {"path": None, "bytes": buffer.getvalue()}


def pixels(image: dict) -> np.ndarray:
    opened = decode_image(image)
    assert opened.mode == "RGB"
    return np.asarray(opened)


def test_what_is_transparent_becomes_white():
    for layer in ([255, 0, 0, 0], [0, 0, 255, 255], [255, 0, 0, 51]):
        expected = [round(c * layer[3] / 255 + 255 - layer[3]) for c in layer[:3]]
        shown = pixels(saved(Image.new("RGBA", (2, 2), tuple(layer))))
        assert abs(shown - np.array(expected, float)).max() <= 1
    assert (pixels(saved(Image.new("LA", (2, 2), (10, 0)))) == 255).all()
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert pixels(saved(palette)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert pixels(saved(palette, transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 255]]]
    red = saved(Image.new("RGB", (1, 1), "red"), transparency=(255, 0, 0))
    assert (pixels(red) == 255).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 255, 256, 32768, 65535], [0, 0, 1, 128, 255]),
        ([0, 16, 2048, 4095], [0, 1, 128, 255]),  # 12 bits, as cameras and scanners write
        ([0, 7, 255], [0, 7, 255]),
        ([0, 2**30, 2**31 - 1], [0, 64, 127]),
    ],
)
def test_more_than_eight_bits_keep_their_grey_levels(values, expected):
    wide = Image.fromarray(np.array([values], dtype=np.int32))
    images = [saved(wide, "TIFF")]
    if max(values) < 2**16:
        short = Image.fromarray(np.array([values], dtype=np.uint16))
        images += [saved(short, "PNG"), saved(short, "TIFF")]
    for image in images:
        assert pixels(image)[..., 0].tolist() == [expected]


def test_colours_of_sixteen_bits_give_the_higher_byte():
    deep = {"path": None, "bytes": deep_png([65535, 32768, 255])}
    assert pixels(deep).tolist() == [[[255, 128, 0]]]


def noise(width: int, height: int, mode="RGB") -> Image.Image:
    """Soft blobs, so that neighbours tell one scale of decoding from another."""
    small = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize(("form", "mode"), [("JPEG", "CMYK"), ("BMP", "P")])
def test_a_gigantic_image_is_made_smaller(form, mode):
    image = noise(4096, 4400, mode)
    opened = decode_image(saved(image, form, quality=95))
    assert opened.size == (2048, 2200) and opened.mode == "RGB"
    whole = image.convert("RGB").resize((2048, 2200), Image.Resampling.BOX)
    assert np.abs(np.asarray(opened, float) - np.asarray(whole, float)).mean() < 2


@pytest.mark.parametrize("size", [(1000, 8200), (8200, 1000), (4095, 5000), (20_000, 150)])
def test_an_image_with_a_short_side_keeps_its_size(size):
    opened = decode_image(saved(Image.new("L", size), "PNG"))
    assert opened.size == size


def test_exif_turns_the_image():
    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    assert pixels(saved(image, exif=exif)).tolist() == [[[255, 0, 0]], [[0, 0, 255]]]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
WHOLE = saved(NOISE)["bytes"]
BAD = {
    "text": (b"<html>404</html>", "cannot identify image file"),
    "truncated PNG": (WHOLE[: len(WHOLE) // 2], "truncated"),
    "broken PNG": (WHOLE[:60] + bytes(100) + WHOLE[160:], "broken|decoder|CRC|truncated|error"),
    "over the limit": (gigantic_png(9460, 9460), "9460 x 9460 pixels; from 1 to 89,478,485 are"),
    "floats": (saved(Image.new("F", (2, 2), 0.5), "TIFF")["bytes"], "save it with 8 bits"),
    "negative": (saved(Image.new("I", (2, 2), -5), "TIFF")["bytes"], "save it with 8 bits"),
    "12 bits of 16 in colour": (deep_png([4095, 4095, 4095]), "save it with 8 bits"),
    "a strip": (image_bytes("red", (2, 401)), "2 x 401 pixels; at most 200:1 is allowed"),
    "too many bytes": (WHOLE + bytes(MAX_IMAGE_BYTES), "has more than 256 MiB. Save it smaller"),
    "EPS": (saved(Image.new("RGB", (2, 2)), "EPS")["bytes"], "broken, or not one of PNG, JPEG"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_has_a_reason_with_the_file(kind, tmp_path):
    content, reason = BAD[kind]
    path = tmp_path / "bad.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.png: .*({reason})"):
        decode_image({"path": str(path), "bytes": None})
    with pytest.raises(ValueError, match=f"an image inside the data: .*({reason})"):
        decode_image({"path": None, "bytes": content})


def test_a_folder_whose_name_begins_alike_is_another(tmp_path):
    for name in ("images", "images-private"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(image_bytes())
    rules = ImageRules(str(tmp_path / "images"))
    for path in ("../images-private/x.png", str(tmp_path / "images-private" / "x.png")):
        with pytest.raises(ValueError, match="images-private/x.png leaves image_folder"):
            rules.image(path)
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "images-private" / "x.png")
    with pytest.raises(ValueError, match="link that leaves image_folder"):
        rules.check_file(rules.image("link.png")["path"])
    assert rules.image("../images/x.png")["path"] == str(tmp_path / "images" / "x.png")


def test_links_are_followed_in_the_folder(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "real.png").write_bytes(b"x")
    (folder / "inner.png").symlink_to(folder / "real.png")
    (tmp_path / "alias").symlink_to(folder)
    ImageRules(str(folder)).check_file(str(folder / "inner.png"))
    ImageRules(str(tmp_path / "alias")).check_file(str(tmp_path / "alias" / "real.png"))
    with pytest.raises(ValueError, match="there is no such image; copy it"):
        ImageRules(str(folder)).check_file(str(folder))


def test_listed_folders_allow_what_looking_at_each_file_allows(tmp_path, monkeypatch):
    """Plain files are not looked at one by one; all else is judged as it was."""
    folder, outside = tmp_path / "images", tmp_path / "images-private"
    for place in (folder / "sub", folder / "many", outside):
        place.mkdir(parents=True)
        (place / "plain.png").write_bytes(b"x")
    (folder / "plain.png").write_bytes(b"x")
    (folder / "inner.png").symlink_to(folder / "plain.png")
    (folder / "leaves.png").symlink_to(outside / "plain.png")
    (folder / "broken.png").symlink_to(folder / "absent.png")
    (folder / "link").symlink_to(outside)
    (folder / "inside").symlink_to(folder / "sub")
    (folder / "folder.png").mkdir()
    for number in range(100):  # more than are listed for one image
        (folder / "many" / f"{number}.png").write_bytes(b"x")
    names = ["plain.png", "sub/plain.png", "sub/../plain.png", "many/50.png", "inside/plain.png"]
    names += ["inner.png", "leaves.png", "broken.png", "link/plain.png", "folder.png", "PLAIN.png"]
    names += ["absent.png", "absent/plain.png", str(folder / "plain.png"), "sub//plain.png"]
    rules = ImageRules(str(folder))
    rows = [[rules.image(name)["path"]] for name in names]
    rows += [[], [rows[0][0], rows[6][0], rows[7][0]], [str(outside / "plain.png")]]
    expected = {}
    for number, paths in enumerate(rows):
        images = [{"path": path, "bytes": None} for path in paths]
        if problem := image_problem(images, rules, decode=False):
            expected[number] = problem
    refused = [names[number] for number in expected if number < len(names)]
    assert refused[:4] == ["leaves.png", "broken.png", "link/plain.png", "folder.png"]
    looked_at = []
    check_file = ImageRules.check_file

    def watched(self, path):
        looked_at.append(path)
        check_file(self, path)

    monkeypatch.setattr(ImageRules, "check_file", watched)
    monkeypatch.setattr(checks, "_LISTED", 4)
    assert file_problems(lambda few: rows[few.start : few.stop], len(rows), rules) == expected
    assert not {rows[0][0], rows[1][0], rows[4][0]} & {*looked_at}
    monkeypatch.chdir(tmp_path)
    anywhere = file_problems(lambda few: rows[few.start : few.stop], len(rows), ImageRules())
    assert {names[number] for number in anywhere if number < len(names)} == {
        *("broken.png", "folder.png", "absent.png", "absent/plain.png"),
        *(["PLAIN.png"] if not (folder / "PLAIN.png").exists() else []),
    }
