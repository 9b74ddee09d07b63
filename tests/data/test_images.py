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
    MAX_IMAGE_BYTES,
    SUFFIXES,
    ImageRules,
    decode_image,
    open_and_find_problem,
)


pytestmark = pytest.mark.slow


RULES = ImageRules("/images")
RED_PIXEL = [255, 0, 0]
BLUE_PIXEL = [0, 0, 255]
WHITE_PIXEL = [255, 255, 255]


def inside(content: bytes) -> dict:
    """An image whose bytes are in the row."""
    return {"path": None, "bytes": content}


def encode(image: Image.Image, image_format="PNG", **options) -> dict:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return inside(buffer.getvalue())


def pixels(image: dict) -> np.ndarray:
    decoded = decode_image(image)
    assert decoded.mode == "RGB"
    return np.asarray(decoded)


@pytest.mark.parametrize(
    "colour",
    [
        (255, 0, 0, 0),
        (0, 0, 255, 255),
        (255, 0, 0, 51),
    ],
)
def test_a_transparent_colour_is_mixed_with_white(colour):
    *channels, opacity = colour
    expected = [round(channel * opacity / 255 + 255 - opacity) for channel in channels]
    image = Image.new("RGBA", (2, 2), colour)
    shown_pixels = pixels(encode(image))
    difference = abs(shown_pixels - np.array(expected, float))
    assert difference.max() <= 1


def test_a_transparent_grey_becomes_white():
    image = Image.new("LA", (2, 2), (10, 0))
    shown_pixels = pixels(encode(image))
    assert (shown_pixels == 255).all()


def test_a_transparent_colour_of_a_palette_becomes_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    opaque = pixels(encode(palette))
    assert opaque.tolist() == [[RED_PIXEL, BLUE_PIXEL]]
    transparent = pixels(encode(palette, transparency=0))
    assert transparent.tolist() == [[WHITE_PIXEL, BLUE_PIXEL]]


def test_a_colour_that_is_marked_as_transparent_becomes_white():
    red_image = Image.new("RGB", (1, 1), "red")
    shown_pixels = pixels(encode(red_image, transparency=(255, 0, 0)))
    assert (shown_pixels == 255).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([0, 255, 256, 32768, 65535], [0, 0, 1, 128, 255], id="16-bits"),
        # As cameras and scanners write:
        pytest.param([0, 16, 2048, 4095], [0, 1, 128, 255], id="12-bits"),
        pytest.param([0, 7, 255], [0, 7, 255], id="8-bits"),
        pytest.param([0, 2**30, 2**31 - 1], [0, 64, 127], id="32-bits"),
        pytest.param([0, 3, 7], [0, 3, 7], id="8-bits-dark"),
    ],
)
def test_more_than_eight_bits_keep_their_grey_levels(values, expected):
    of_32_bits = Image.fromarray(np.array([values], dtype=np.int32))
    images = [encode(of_32_bits, "TIFF")]
    if max(values) < 2**16:
        of_16_bits = Image.fromarray(np.array([values], dtype=np.uint16))
        images.append(encode(of_16_bits, "PNG"))
        images.append(encode(of_16_bits, "TIFF"))
    for image in images:
        assert pixels(image)[..., 0].tolist() == [expected]


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ([65535, 32768, 255], [255, 128, 0]),
        ([64 << 8, 0, 0], [64, 0, 0]),  # the darkest whose range is still known
    ],
)
def test_colours_of_sixteen_bits_give_the_higher_byte(colour, expected):
    image = inside(deep_png(colour))
    assert pixels(image).tolist() == [[expected]]


def blobs(width: int, height: int, mode="RGB") -> Image.Image:
    """Soft blobs, so that neighbours tell one scale of decoding from another."""
    small_shape = (height // 16, width // 16, 3)
    random_pixels = np.random.default_rng(0).integers(0, 256, small_shape, np.uint8)
    small_image = Image.fromarray(random_pixels)
    large_image = small_image.resize((width, height), Image.Resampling.BICUBIC)
    return large_image.convert(mode)


@pytest.mark.parametrize(("image_format", "mode"), [("JPEG", "CMYK"), ("BMP", "P")])
def test_a_gigantic_image_is_made_smaller(image_format, mode):
    image = blobs(4096, 4400, mode)
    decoded = decode_image(encode(image, image_format, quality=95))
    assert decoded.size == (2048, 2200)
    assert decoded.mode == "RGB"

    expected = image.convert("RGB").resize((2048, 2200), Image.Resampling.BOX)
    difference = np.asarray(decoded, float) - np.asarray(expected, float)
    assert np.abs(difference).mean() < 2


@pytest.mark.parametrize(
    "size",
    [
        (1000, 8200),
        (8200, 1000),
        (4095, 5000),
        (20_000, 150),
        (400, 2),
    ],
)
def test_an_image_with_a_short_side_keeps_its_size(size):
    image = Image.new("L", size)
    decoded = decode_image(encode(image, "PNG"))
    assert decoded.size == size


def test_exif_turns_the_image():
    red_and_blue = Image.new("RGB", (2, 1), "red")
    red_and_blue.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    shown_pixels = pixels(encode(red_and_blue, exif=exif))
    assert shown_pixels.tolist() == [[RED_PIXEL], [BLUE_PIXEL]]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
WHOLE = encode(NOISE)["bytes"]
BAD_IMAGES = {
    "text": {
        "content": b"<html>404</html>",
        "reason": "cannot identify image file",
    },
    "truncated PNG": {
        "content": WHOLE[: len(WHOLE) // 2],
        "reason": "truncated",
    },
    "broken PNG": {
        "content": WHOLE[:60] + bytes(100) + WHOLE[160:],
        "reason": "broken|decoder|CRC|truncated|error",
    },
    "over the limit": {
        "content": gigantic_png(9460, 9460),
        "reason": "9460 x 9460 pixels; from 1 to 89,478,485 are",
    },
    "floats": {
        "content": encode(Image.new("F", (2, 2), 0.5), "TIFF")["bytes"],
        "reason": "save it with 8 bits",
    },
    "negative": {
        "content": encode(Image.new("I", (2, 2), -5), "TIFF")["bytes"],
        "reason": "save it with 8 bits",
    },
    "12 bits of 16 in colour": {
        "content": deep_png([4095, 4095, 4095]),
        "reason": "save it with 8 bits",
    },
    "a strip": {
        "content": image_bytes("red", (2, 401)),
        "reason": "2 x 401 pixels; at most 200:1 is allowed",
    },
    "too many bytes": {
        "content": WHOLE + bytes(MAX_IMAGE_BYTES),
        "reason": "has more than 256 MiB. Save it smaller",
    },
    "EPS": {
        "content": encode(Image.new("RGB", (2, 2)), "EPS")["bytes"],
        "reason": "broken, or not one of PNG, JPEG",
    },
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_has_a_reason_with_the_file(kind, tmp_path):
    content = BAD_IMAGES[kind]["content"]
    reason = BAD_IMAGES[kind]["reason"]
    image_path = tmp_path / "bad.png"
    image_path.write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.png: .*({reason})"):
        decode_image({"path": str(image_path), "bytes": None})
    with pytest.raises(ValueError, match=f"an image inside the data: .*({reason})"):
        decode_image(inside(content))


@pytest.fixture
def folders_of_similar_names(tmp_path):
    """The folders images and images-private, each with x.png. Returns the first."""
    for file_name in ("images", "images-private"):
        folder = tmp_path / file_name
        folder.mkdir()
        (folder / "x.png").write_bytes(image_bytes())
    return tmp_path / "images"


def test_a_folder_whose_name_begins_alike_is_another(folders_of_similar_names, tmp_path):
    rules = ImageRules(str(folders_of_similar_names))
    for image_path in ("../images-private/x.png", str(tmp_path / "images-private" / "x.png")):
        with pytest.raises(ValueError, match="images-private/x.png leaves image_folder"):
            rules.image(image_path)
    expected = str(folders_of_similar_names / "x.png")
    assert rules.image("../images/x.png")["path"] == expected


def test_a_link_to_another_folder_leaves_the_image_folder(folders_of_similar_names, tmp_path):
    rules = ImageRules(str(folders_of_similar_names))
    link_path = folders_of_similar_names / "link.png"
    link_path.symlink_to(tmp_path / "images-private" / "x.png")
    with pytest.raises(ValueError, match="link that leaves image_folder"):
        rules.check_file(rules.image("link.png")["path"])


def test_links_are_followed_in_the_folder(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "real.png").write_bytes(b"x")
    (folder / "inner.png").symlink_to(folder / "real.png")
    ImageRules(str(folder)).check_file(str(folder / "inner.png"))

    alias_folder = tmp_path / "alias"
    alias_folder.symlink_to(folder)
    ImageRules(str(alias_folder)).check_file(str(alias_folder / "real.png"))

    with pytest.raises(ValueError, match="there is no such image; copy it"):
        ImageRules(str(folder)).check_file(str(folder))


@pytest.fixture
def linked_folder(tmp_path):
    """An image folder with plain files, folders, and links that stay in it, leave it or break."""
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
    return folder


LINKED_NAMES = [
    "plain.png",
    "sub/plain.png",
    "sub/../plain.png",
    "many/50.png",
    "inside/plain.png",
    "inner.png",
    "leaves.png",
    "broken.png",
    "link/plain.png",
    "folder.png",
    "PLAIN.png",
    "absent.png",
    "absent/plain.png",
    "sub//plain.png",
]


class PathsOfRows:
    """A row for each name, and rows of no image, of three images, and of one outside."""

    def __init__(self, folder):
        self.rules = ImageRules(str(folder))
        self.names = [*LINKED_NAMES, str(folder / "plain.png")]
        outside = folder.with_name("images-private") / "plain.png"
        self.rows = [[self.path_of(file_name)] for file_name in self.names]
        self.rows.append([])
        self.rows.append(
            [
                self.path_of("plain.png"),
                self.path_of("leaves.png"),
                self.path_of("broken.png"),
            ]
        )
        self.rows.append([str(outside)])

    def path_of(self, file_name) -> str:
        return self.rules.image(file_name)["path"]

    def problems(self, rules) -> dict:
        """Returns the problems by the numbers of their rows."""
        return unopened_image_problems(self.rows, rules)

    def names_of(self, problems) -> list[str]:
        """Returns the names of the rows of one image that have a problem."""
        return [self.names[number] for number in problems if number < len(self.names)]


@pytest.fixture
def paths_of_rows(linked_folder, monkeypatch):
    monkeypatch.setattr(checks, "_LISTED", 4)
    return PathsOfRows(linked_folder)


def test_listed_folders_allow_what_looking_at_each_file_allows(paths_of_rows):
    expected = {}
    for number, image_paths in enumerate(paths_of_rows.rows):
        images = [{"path": image_path, "bytes": None} for image_path in image_paths]
        problem = open_and_find_problem(images, paths_of_rows.rules, decode=False)
        if problem:
            expected[number] = problem
    refused = paths_of_rows.names_of(expected)
    assert refused[:4] == ["leaves.png", "broken.png", "link/plain.png", "folder.png"]

    assert paths_of_rows.problems(paths_of_rows.rules) == expected


def test_plain_files_of_listed_folders_are_not_looked_at(paths_of_rows, monkeypatch):
    looked_at = []
    check_file = ImageRules.check_file

    def recording_check_file(self, image_path):
        looked_at.append(image_path)
        check_file(self, image_path)

    monkeypatch.setattr(ImageRules, "check_file", recording_check_file)
    paths_of_rows.problems(paths_of_rows.rules)
    assert looked_at
    for file_name in ("plain.png", "sub/plain.png", "inside/plain.png"):
        assert paths_of_rows.path_of(file_name) not in looked_at


def test_files_may_be_anywhere_without_an_image_folder(paths_of_rows, linked_folder, monkeypatch):
    monkeypatch.chdir(linked_folder.parent)
    expected = {"broken.png", "folder.png", "absent.png", "absent/plain.png"}
    if not (linked_folder / "PLAIN.png").exists():
        expected.add("PLAIN.png")
    problems = paths_of_rows.problems(ImageRules())
    assert set(paths_of_rows.names_of(problems)) == expected


KNOWN_FORMATS = ["PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF"]


@pytest.mark.parametrize("image_format", KNOWN_FORMATS)
def test_an_image_of_a_known_format_is_decoded(image_format):
    decoded = decode_image(inside(image_bytes("red", form=image_format)))
    red_image, green, blue = decoded.getpixel((3, 3))
    assert red_image > 240
    assert green < 15
    assert blue < 15


def test_the_formats_and_suffixes_of_images():
    assert set(FORMATS) == set(KNOWN_FORMATS)
    names = "png jpg jpeg jfif webp gif bmp ppm tif tiff avif"
    assert sorted(SUFFIXES) == sorted(f".{file_name}" for file_name in names.split())


IN_BASE64 = {
    image_format: image_bytes("red", (64, 64), image_format)
    for image_format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "AVIF")
}
IN_BASE64["TIFF of a scanner"] = b"MM\0*\0\0\0\x08" + bytes(100)  # of the other byte order


@pytest.mark.parametrize("image_format", IN_BASE64)
def test_an_image_may_be_only_its_base64_in_one_line_or_several(image_format):
    content = IN_BASE64[image_format]
    one_line = base64.b64encode(content).decode()
    short_lines = [one_line[start : start + 16] for start in range(0, len(one_line), 16)]
    for encoded_text in (
        one_line,
        base64.encodebytes(content).decode(),
        f"data:image/any;base64,{one_line}",
        "\n".join(short_lines),
    ):
        assert RULES.image(encoded_text) == inside(content)


BASE64 = base64.b64encode(image_bytes()).decode()


@pytest.mark.parametrize(
    "text",
    [
        f"data:image/png;base64,{BASE64[:8]}@@@@{BASE64[8:]}",
        "data:image/png,x",
    ],
)
def test_an_address_of_broken_base64_is_not_an_image(text):
    with pytest.raises(ValueError, match="is not in base64"):
        ImageRules().image(text)


def test_a_path_may_have_only_letters_of_base64():
    file_name = f"{BASE64[:101]}.png"
    assert RULES.image(file_name)["path"] == f"/images/{file_name}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "",
        {},
        {"path": ""},
        {"path": None, "bytes": None},
        {"path": "a.png", "bytes": 7},
        ["a.png"],
    ],
)
def test_what_is_neither_bytes_nor_a_path_is_not_an_image(value):
    with pytest.raises(ValueError, match="an image must be a path, bytes, or a mapping"):
        ImageRules().image(value)


def test_a_path_with_half_a_letter_is_none():
    with pytest.raises(ValueError, match="neither a valid path nor an image file"):
        ImageRules().image("a\ud83d.png")


@pytest.mark.parametrize("place", ["hub", "cache"])
def test_what_datasets_has_of_the_hub_is_allowed_only_to_its_data_set(tmp_path, monkeypatch, place):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    stored = {"path": str(tmp_path / place / "a.png"), "bytes": None}
    assert ImageRules(None, "user/data").image(stored) == stored
    with pytest.raises(ValueError, match="leaves image_folder /images"):
        RULES.image(stored)


def test_an_image_that_datasets_streams_is_not_allowed_with_an_image_folder():
    streamed = {"path": "hf://datasets/user/data@0c/a.png", "bytes": None}
    assert ImageRules().image(streamed) == streamed
    assert ImageRules(None, "user/data").image(streamed) == streamed
    with pytest.raises(ValueError, match="is an address; nothing is fetched"):
        RULES.image(streamed)


def test_a_relative_path_of_a_hub_data_set_needs_an_image_folder():
    image = ImageRules("/images", "user/data").image("sub/a.png")
    assert image == {"path": "/images/sub/a.png", "bytes": None}
    with pytest.raises(ValueError, match="sub/a.png is a path in an unknown folder"):
        ImageRules(None, "user/data").image("sub/a.png")


def test_an_image_of_pillow_is_kept_when_its_file_changes(tmp_path):
    image_path = tmp_path / "a.png"
    image_path.write_bytes(image_bytes("red"))
    with Image.open(image_path) as opened:
        kept = RULES.image(opened)
    image_path.write_bytes(image_bytes("blue"))
    assert kept["path"] is None
    assert (pixels(kept) == RED_PIXEL).all()


RED = image_bytes("red", (64, 64))
BLUE = image_bytes("blue", (64, 64))
BLUE_IN_BASE64 = base64.b64encode(BLUE).decode()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(RED, id="bytes"),
        pytest.param({"bytes": RED}, id="no-path"),
        pytest.param({"path": BLUE_IN_BASE64, "bytes": RED}, id="base64-as-path"),
        pytest.param({"path": "", "bytes": RED}, id="empty-path"),
    ],
)
def test_the_bytes_of_an_image_are_not_taken_from_its_path(value):
    assert RULES.image(value) == inside(RED)


def test_a_path_may_be_an_image_in_base64():
    image = RULES.image({"path": BLUE_IN_BASE64, "bytes": None})
    assert image == inside(BLUE)


def test_the_first_image_that_is_bad_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes())
    rules = ImageRules(str(tmp_path))
    good_image = rules.image("a.png")
    missing_image = rules.image("none.png")
    also_missing = rules.image("other.png")

    image_path, reason = open_and_find_problem([good_image, missing_image, also_missing], rules)
    assert image_path == missing_image["path"]
    assert "none.png: there is no such image" in reason
    assert open_and_find_problem([good_image], rules) is None


def test_an_image_inside_a_row_has_no_path_in_its_problem(tmp_path):
    rules = ImageRules(str(tmp_path))
    broken_image = inside(b"x")
    image_path, _ = open_and_find_problem([broken_image, rules.image("none.png")], rules)
    assert image_path is None
    assert open_and_find_problem([broken_image], rules, decode=False) is None


def test_an_error_of_a_decoder_without_words_is_named_by_its_kind(monkeypatch):
    def end_of_file(opened):
        raise EOFError

    monkeypatch.setattr(rows_images, "_upright_rgb", end_of_file)
    with pytest.raises(ValueError, match="an image inside the data: EOFError$"):
        decode_image(inside(image_bytes()))
