"""Requests to `serve` that no client should send, and words of the answer to each."""

import base64
import io

from PIL import Image


HI = [{"role": "user", "content": "hi"}]


def shown(url, **options):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, **options}


def said(*messages, **options):
    return {"messages": list(messages), "max_tokens": 2, **options}


def packed(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(size, mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


BODIES = {
    "no JSON": (b"{", "Invalid JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', "Invalid JSON"),
    "nothing": (b"", "Invalid JSON"),
    "a list": ([], "object"),
    "null": (None, "object"),
    "nested deeply": (b'{"messages": ' + b"[" * 10**4, "recursion limit"),
    "nested deeply in a field that is not read": (b'{"messages": [], "user": ' + b'{"a":' * 10**4, "recursion limit"),
    "nothing but brackets": (b'{"messages": [], "user": ' + b"[" * 10**7, "more than 100,000 commas and brackets"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "Invalid JSON"),
    "no messages": ({"max_tokens": 2}, "messages: Field required"),
    "empty messages": (said(), "messages", "at least 1"),
    "too many messages": (said(*HI * 1001), "at most 1000"),
    "messages is null": ({"messages": None}, "messages"),
    "messages is text": ({"messages": "hi"}, "messages", "'hi'"),
    "a message is text": (said("hi"), "messages.0", "'hi'"),
    "no role": (said({"content": "hi"}), "messages.0.role: Field required"),
    "unknown role": (said({"role": "boss", "content": "hi"}), "'system', 'user' or 'assistant', got 'boss'"),
    "a list for a role": (said({"role": ["user"], "content": "hi"}), "messages.0.role"),
    "no content": (said({"role": "user"}), "messages.0.content: Field required"),
    "a number for content": (said({"role": "user", "content": 5}), "messages.0.content", "got 5"),
    "text among the parts": (said({"role": "user", "content": ["hi"]}), "messages.0.content.0", "'hi'"),
    "unknown part": (said({"role": "user", "content": [{"type": "video"}]}), "'video'", "'text', 'image_url'"),
    "part without type": (said({"role": "user", "content": [{"text": "hi"}]}), "messages.0.content.0"),
    "part without text": (said({"role": "user", "content": [{"type": "text"}]}), "Field required"),
    "image without address": (said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "url"),
    "a number for an address": (shown(5), "url", "got 5"),
    "max_tokens -1": (said(*HI, max_tokens=-1), "max_tokens", "got -1"),
    "max_tokens 0": (said(*HI, max_tokens=0), "max_tokens", "got 0"),
    "max_tokens 1.5": (said(*HI, max_tokens=1.5), "max_tokens", "got 1.5"),
    "max_tokens many": (said(*HI, max_tokens="many"), "max_tokens", "got 'many'"),
    "max_tokens true": (said(*HI, max_tokens=True), "max_tokens", "got True"),
    "max_tokens Infinity": (said(*HI, max_tokens=float("inf")), "max_tokens", "finite"),
    "max_tokens of 5000 digits": (b'{"messages": [], "max_tokens": ' + b"9" * 5000 + b"}", "."),
    "temperature NaN": (said(*HI, temperature=float("nan")), "temperature", "finite"),
    "temperature -1": (said(*HI, temperature=-1), "temperature", "got -1"),
    "temperature hot": (said(*HI, temperature="hot"), "temperature", "got 'hot'"),
    "top_p 0": (said(*HI, top_p=0), "top_p", "got 0"),
    "top_p 7": (said(*HI, top_p=7), "top_p", "got 7"),
    "seed beyond 64 bits": (said(*HI, seed=2**64), "seed"),
    "an empty stop": (said(*HI, stop=""), "stop.0"),
    "five stops": (said(*HI, stop=list("abcde")), "stop", "at most 4"),
    "stream maybe": (said(*HI, stream="maybe"), "stream", "got 'maybe'"),
    "two answers": (said(*HI, n=2), "n: Input should be 1"),
    "logprobs": (said(*HI, logprobs=True), "logprobs is not supported"),
    "tools": (said(*HI, tools=[{"type": "function"}]), "tools is not supported"),
    "a template's variables": (said(*HI, chat_template_kwargs={"a": 1}), "chat_template_kwargs is not supported"),
    "a field of a name with 10,000 letters": (said(*HI, **{"a" * 10**4: 1}), "is not supported"),
    "another model": (said(*HI, model="another/model"), "another/model"),
    "a model that is a number": (said(*HI, model=5), "model", "got 5"),
    "the image's token in a text": (said({"role": "user", "content": "<image>"}), "<image>", "Leave it out"),
    "the token in two halves": (
        said({"role": "user", "content": [{"type": "text", "text": "<ima"}, {"type": "text", "text": "ge>"}]}),
        "<image>",
    ),
    "base64 of no image": (shown("data:image/png;base64,AAAA"), "Image 1", "PNG"),
    "no base64": (shown("data:image/png;base64,@"), "base64"),
    "data that is not base64": (shown("data:text/plain,hello"), "base64"),
    "an empty image": (shown("data:image/png;base64,"), "Image 1"),
    "an image cut short": (shown(packed(png((64, 64))[:60])), "Image 1"),
    "SVG": (shown(packed(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml")), "Image 1"),
    "PostScript": (shown(packed(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")), "Image 1"),
    "400 million pixels": (shown(packed(png((20000, 20000), "1"))), "Image 1", "50,000,000 pixels"),
    "64 million pixels": (shown(packed(png((8000, 8000), "1"))), "Image 1", "50,000,000"),
    "a line of pixels": (shown(packed(png((20000, 1)))), "Image 1", "20000 x 1"),
    "a path": (shown("/etc/hostname"), "opens no files: '/etc/hostname'"),
    "a relative path": (shown("../../etc/hostname"), "data:"),
    "a file's address": (shown("file:///etc/hostname"), "file:///etc/hostname", "data:"),
    "capital letters": (shown("DATA:image/png;base64,AAAA"), "opens no files"),
    "another protocol": (shown("ftp://127.0.0.1/a.png"), "data:"),
}
