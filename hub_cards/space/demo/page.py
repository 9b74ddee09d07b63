# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The page, and its server."""

import os
import re
from typing import Any

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .asking import Asker
from .figures import show_layer
from .images import EXAMPLES, draw_example


MAX_FILE = "20mb"
TOGETHER, WAITING = 2, 20  # people who are answered at the same time, and who may wait for that
KEPT = 3600  # seconds for which images and measurements are kept
FIGURE: dict[str, Any] = {"interactive": False, "format": "png", "show_label": False, "buttons": ["fullscreen"]}
LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
"""This computer as its own browser names it, with or without a port."""
CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
#figures img { background: white; }
"""


def build_app(model: Any, processor: Any, *, title: str, source: str, max_new_tokens: int = 256) -> gr.Blocks:
    """The page, for [`launch`], of the model and processor that `load` gave.

    Hooks are put on the model's decoder. `source` is Markdown that tells which model answers.
    """
    asker = Asker(model, processor, max_new_tokens)
    layers = len(model.get_decoder().layers)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(KEPT, KEPT)) as app:
        gr.Markdown(
            f"# {title}\nAsk about an image. Below the answer the page shows where the words look in the image, "
            f"and the norms of visual and text tokens in every layer of the language model. {source}"
        )
        measured = gr.State(time_to_live=KEPT)
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=320):
                image = gr.Image(
                    label="Image",
                    sources=["upload", "clipboard"],
                    height=300,
                    buttons=["fullscreen"],
                    alt_text="The image that is asked about",
                    elem_id="image",
                )
                question = gr.Textbox(
                    label="Question", placeholder="What is in the image?", max_lines=4, elem_id="question"
                )
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80, elem_id="ask")
                    stop = gr.Button("Stop", min_width=80, elem_id="stop")
                gr.Examples(
                    [[draw_example(shape, color), asked] for shape, color, asked in EXAMPLES],
                    [image, question],
                    label="Examples",
                    example_labels=[f"{color} {shape}: {asked}" for shape, color, asked in EXAMPLES],
                )
            with gr.Column(scale=3, min_width=320, elem_id="figures"):
                answer = gr.Textbox(label="Answer", lines=2, interactive=False, elem_id="answer")
                numbers = gr.Markdown(elem_id="numbers")
                gr.Markdown("### Where the words look")
                heat = gr.Image(label="Attention map", elem_id="heat", **FIGURE)
                layer = gr.Slider(
                    0, layers, 0, step=1, precision=0, label="Layer", info="0: mean over all layers", elem_id="layer"
                )
                gr.Markdown("### Norms of visual and text tokens, layer by layer")
                chart = gr.Image(label="Norms by layer", elem_id="chart", **FIGURE)
        # Without gr.Image's own preprocessing, so that a file that cannot be read gets a message of this page.
        asked = gr.on(
            [ask.click, question.submit],
            asker.ask,
            [image, question, layer],
            [answer, numbers, heat, chart, measured],
            preprocess=False,
            concurrency_limit=TOGETHER,
            trigger_mode="once",
            show_progress_on=answer,
            scroll_to_output=True,
            api_name="ask",
        )
        stop.click(None, cancels=[asked], api_visibility="private")
        # Gradio ends a stopped question with a message without data, at which the page may show "Error". Whatever did
        # fail has its own message, so the answer's box is cleared.
        asked.failure(gr.skip, None, answer, queue=False, show_progress="hidden", api_visibility="private")
        layer.input(
            show_layer,
            [measured, layer],
            heat,
            concurrency_limit=TOGETHER,
            trigger_mode="always_last",
            show_progress="hidden",
            api_visibility="private",
        )
    return app


class OwnPage:
    """Middleware that refuses other pages in the same browser: by `Origin` those that use the server's address, by
    `Host` those that use a name of theirs which leads to it (DNS rebinding)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] != "lifespan":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if not LOCAL.fullmatch(host) or origin and origin.partition("://")[2] != host:
                answer = PlainTextResponse("Open the page as http://localhost with its port.", 403)
        await answer(scope, receive, send)


def launch(app: gr.Blocks, **options: Any) -> None:
    """Serves the page and nothing else: no tunnel, no telemetry, no font or script from elsewhere.

    Other pages are refused ([`OwnPage`]) where it listens for this computer alone, as by default outside a Space.
    """
    name = options.get("server_name") or os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    is_local = "SPACE_ID" not in os.environ and LOCAL.fullmatch(name)
    font, font_mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    theme = gr.themes.Default(primary_hue="blue", font=font, font_mono=font_mono)
    app.queue(max_size=WAITING).launch(
        theme=theme.set(block_info_text_color="*neutral_600"),  # the default is too pale to read
        css=CSS,
        share=False,
        ssr_mode=False,
        pwa=False,
        run_history=False,
        footer_links=["api", "gradio"],
        max_file_size=MAX_FILE,
        app_kwargs={"middleware": [Middleware(OwnPage)] if is_local else []},
        **options,
    )
