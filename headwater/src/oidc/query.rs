//! Fields of forms, and of the queries of URLs.

/// Encodes fields for a form, or for the query of a URL.
pub fn encoded(fields: &[(&str, &str)]) -> String {
    let field = |(name, value): &(&str, &str)| format!("{}={}", escaped(name), escaped(value));
    fields.iter().map(field).collect::<Vec<_>>().join("&")
}

fn escaped(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// The value of a field of a query.
pub fn field(query: &str, name: &str) -> Option<String> {
    let value = query.split('&').find_map(|field| field.strip_prefix(name)?.strip_prefix('='))?;
    let mut bytes = Vec::new();
    let mut rest = value.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        let (byte, taken) = match (first, after.get(..2).and_then(hex)) {
            (b'%', Some(byte)) => (byte, 2),
            (b'+', _) => (b' ', 0),
            _ => (*first, 0),
        };
        bytes.push(byte);
        rest = after.get(taken..).unwrap_or_default();
    }
    String::from_utf8(bytes).ok()
}

/// Makes a text of an identity provider safe for a terminal: one line, without control characters, and not too long.
pub fn plain(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_survive_a_query() {
        for text in ["", "a b+c", "%41", "\u{e9}&=?", "%", "%4"] {
            let query = encoded(&[("state", "x"), ("code", text)]);
            assert_eq!(field(&query, "code").as_deref(), Some(text), "{query}");
        }
        assert_eq!(field("code=1&state=2", "error"), None);
        assert_eq!(field("a=%zz&b=%", "a").as_deref(), Some("%zz"));
    }

    #[test]
    fn texts_of_others_cannot_control_a_terminal() {
        assert_eq!(plain(" access_denied \u{1b}[2Jno\n"), "access_denied [2Jno");
        assert_eq!(plain(&"x".repeat(1000)).len(), 300);
    }
}
