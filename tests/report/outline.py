"""What a page consists of, for tests that nothing in it runs."""

from html.parser import HTMLParser


class Outline(HTMLParser):
    """Names of tags and of attributes, and the text outside of style sheets."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text, self._style = set(), set(), "", False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        self.text += "" if self._style else f"{data}\n"
