import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn_figures(monkeypatch):
    """Keeps the figures that are drawn, and leaves their files empty."""
    figures = []

    def keep_figure(figure, file, **options):
        figures.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", keep_figure)
    return figures
