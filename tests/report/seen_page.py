"""Pages as a reader finds them: elements and words."""

from html.parser import HTMLParser

VOID = {"meta", "input", "img", "br"}


class Seen(HTMLParser):
    """Elements, attributes and text of a page; fails where an element is not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert not self.open
        self.words = " ".join(" ".join(self.text).split())
        self.plots = [a["id"] for a in self.all("div") if a.get("class") == "plot"]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)

    def all(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]
