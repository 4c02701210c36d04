"""Makes text from outside safe to print: model files and configurations may hold escape sequences. Pure."""


def escape_control(text: str, *, keep: str = "") -> str:
    r"""Return text with control, bidirectional and other invisible characters written as \xNN or \uNNNN.

    A tensor name or an error text must not move the cursor, recolour the terminal or reorder a line. keep
    names characters that pass, for example a newline.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in keep or _is_harmless(char) else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    # str.isprintable is False for the Unicode categories Cc, Cf, Cs, Co, Cn, Zl, Zp and odd spaces.
    return char.isprintable()


def _escape(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
