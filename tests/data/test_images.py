"""Images of all modes become upright RGB; what cannot be shown has a reason that names the file."""

import base64
import io

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image
from train_data import deep_png, gigantic_png, image_bytes

from normalign_llava.data.rows import checks, images as rows_images
from normalign_llava.data.rows.checks import unopened_image_problems
from normalign_llava.data.rows.images import (
    FORMATS,
    SUFFIXES,
    ImageRules,
    decode_image,
    image_problem,
)
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
        ([0, 3, 7], [0, 3, 7]),  # a dark one of 8 bits
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
    darkest = {"path": None, "bytes": deep_png([64 << 8, 0, 0])}  # whose range is still known
    assert pixels(darkest).tolist() == [[[64, 0, 0]]]


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


@pytest.mark.parametrize(
    "size", [(1000, 8200), (8200, 1000), (4095, 5000), (20_000, 150), (400, 2)]
)
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
    folder = tmp_path / "images"
    outside = tmp_path / "images-private"
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
    assert unopened_image_problems(rows, rules) == expected
    assert not {rows[0][0], rows[1][0], rows[4][0]} & {*looked_at}
    monkeypatch.chdir(tmp_path)
    anywhere = unopened_image_problems(rows, ImageRules())
    assert {names[number] for number in anywhere if number < len(names)} == {
        *("broken.png", "folder.png", "absent.png", "absent/plain.png"),
        *(["PLAIN.png"] if not (folder / "PLAIN.png").exists() else []),
    }


def test_the_formats_and_suffixes_of_images():
    known = {"PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF"}
    assert {*FORMATS} == known
    for form in known:
        decoded = decode_image({"path": None, "bytes": image_bytes("red", form=form)})
        red, green, blue = decoded.getpixel((3, 3))
        assert red > 240 and max(green, blue) < 15, form
    names = "png jpg jpeg jfif webp gif bmp ppm tif tiff avif"
    assert sorted(SUFFIXES) == sorted(f".{name}" for name in names.split())


IN_BASE64 = {form: image_bytes("red", (64, 64), form) for form in ("PNG", "JPEG", "GIF", "WEBP")}
IN_BASE64 |= {form: image_bytes("red", (64, 64), form) for form in ("TIFF", "AVIF")}
IN_BASE64["TIFF of a scanner"] = b"MM\0*\0\0\0\x08" + bytes(100)  # of the other byte order


@pytest.mark.parametrize("form", IN_BASE64)
def test_an_image_may_be_its_base64_alone_in_one_line_or_several(form):
    content = IN_BASE64[form]
    encoded = [base64.b64encode(content).decode(), base64.encodebytes(content).decode()]
    for text in (*encoded, f"data:image/any;base64,{encoded[0]}"):
        assert ImageRules("/images").image(text) == {"path": None, "bytes": content}
    lines = "\n".join(encoded[0][at : at + 16] for at in range(0, len(encoded[0]), 16))
    assert ImageRules("/images").image(lines)["bytes"] == content


def test_what_begins_as_base64_and_is_none_is_no_image():
    encoded = base64.b64encode(image_bytes()).decode()
    for text in (f"data:image/png;base64,{encoded[:8]}@@@@{encoded[8:]}", "data:image/png,x"):
        with pytest.raises(ValueError, match="is not in base64"):
            ImageRules().image(text)
    name = f"{encoded[:101]}.png"  # a path of letters that base64 has too
    assert ImageRules("/images").image(name)["path"] == f"/images/{name}"


@pytest.mark.parametrize(
    "value",
    [
        None, 7, "", {}, {"path": ""}, {"path": None, "bytes": None}, {"path": "a.png", "bytes": 7},
        ["a.png"],
    ],
)  # fmt: skip
def test_what_is_neither_bytes_nor_a_path_is_no_image(value):
    with pytest.raises(ValueError, match="an image must be a path, bytes, or a mapping"):
        ImageRules().image(value)


def test_a_path_with_half_a_letter_is_none():
    with pytest.raises(ValueError, match="neither a valid path nor an image file"):
        ImageRules().image("a\ud83d.png")


def test_what_datasets_has_of_the_hub_is_allowed_to_its_data_set_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    places = [tmp_path / "hub" / "a.png", tmp_path / "cache" / "a.png"]  # the other is `datasets`'
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for place in map(str, places):
        stored = {"path": place, "bytes": None}
        assert ImageRules(None, "user/data").image(stored) == stored
        with pytest.raises(ValueError, match="leaves image_folder /images"):
            ImageRules("/images").image(stored)
    streamed = {"path": "hf://datasets/user/data@0c/a.png", "bytes": None}
    assert ImageRules().image(streamed) == ImageRules(None, "user/data").image(streamed) == streamed
    with pytest.raises(ValueError, match="is an address; nothing is fetched"):
        ImageRules("/images").image(streamed)
    named = ImageRules("/images", "user/data").image("sub/a.png")
    assert named == {"path": "/images/sub/a.png", "bytes": None}
    with pytest.raises(ValueError, match="sub/a.png is a path in an unknown folder"):
        ImageRules(None, "user/data").image("sub/a.png")


def test_an_image_of_pillow_is_kept_when_its_file_changes(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(image_bytes("red"))
    with Image.open(file) as opened:
        kept = ImageRules("/images").image(opened)
    file.write_bytes(image_bytes("blue"))
    assert kept["path"] is None and (pixels(kept) == [255, 0, 0]).all()


def test_the_bytes_of_an_image_are_not_taken_from_its_path():
    red = image_bytes("red", (64, 64))
    blue = image_bytes("blue", (64, 64))
    in_text = base64.b64encode(blue).decode()
    for value in (red, {"bytes": red}, {"path": in_text, "bytes": red}, {"path": "", "bytes": red}):
        assert ImageRules("/images").image(value) == {"path": None, "bytes": red}
    encoded = {"path": in_text, "bytes": None}
    assert ImageRules("/images").image(encoded) == {"path": None, "bytes": blue}


def test_the_first_image_that_is_bad_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes())
    rules = ImageRules(str(tmp_path))
    inside = {"path": None, "bytes": b"x"}
    images = [rules.image(name) for name in ("a.png", "none.png", "other.png")]
    path, reason = image_problem(images, rules)
    assert path == images[1]["path"] and "none.png: there is no such image" in reason
    assert image_problem([inside, images[1]], rules)[0] is None  # and its reason says so
    assert image_problem([inside], rules, decode=False) is None
    assert image_problem(images[:1], rules) is None


def test_an_error_of_a_decoder_without_words_is_named_by_its_kind(monkeypatch):
    def ends(opened):
        raise EOFError

    monkeypatch.setattr(rows_images, "_upright_rgb", ends)
    with pytest.raises(ValueError, match="an image inside the data: EOFError$"):
        decode_image({"path": None, "bytes": image_bytes()})
