//! Text of logins and text requests: `key=value` pairs, each terminated by a zero byte.

/// Longest key in bytes.
pub const KEY_BYTES: usize = 63;

/// Longest value in bytes: enough for 1024 bytes of binary data as hexadecimal digits, the longest value of
/// the protocol.
pub const VALUE_BYTES: usize = 2 + 2 * 1024;

/// A text that is not a list of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The last pair has no end.
    #[error("the last key=value pair of its text has no zero byte at its end")]
    NoEnd,
    /// A pair has no `=`.
    #[error("a key=value pair of its text has no '='")]
    NoEquals,
    /// A key is empty, too long or has characters that keys cannot have.
    #[error("a key is empty, longer than {KEY_BYTES} bytes, or has characters that keys cannot have")]
    BadKey,
    /// A value is too long.
    #[error("a value is longer than {VALUE_BYTES} bytes")]
    LongValue,
    /// A value is not UTF-8.
    #[error("a value is not UTF-8")]
    NotUtf8,
}

/// The pairs of a text. Zero bytes between and after pairs are skipped: some initiators pad with them.
pub fn pairs(text: &[u8]) -> Result<Vec<(&str, &str)>, TextError> {
    let mut pairs = Vec::new();
    if text.last().is_some_and(|last| *last != 0) {
        return Err(TextError::NoEnd);
    }
    for pair in text.split(|byte| *byte == 0).filter(|pair| !pair.is_empty()) {
        let at = pair.iter().position(|byte| *byte == b'=').ok_or(TextError::NoEquals)?;
        let (key, rest) = pair.split_at(at);
        let value = rest.get(1..).unwrap_or_default();
        if !is_key(key) {
            return Err(TextError::BadKey);
        }
        if value.len() > VALUE_BYTES {
            return Err(TextError::LongValue);
        }
        let key = std::str::from_utf8(key).map_err(|_| TextError::BadKey)?;
        pairs.push((key, std::str::from_utf8(value).map_err(|_| TextError::NotUtf8)?));
    }
    Ok(pairs)
}

/// Adds a pair.
pub fn put_pair(text: &mut Vec<u8>, key: &str, value: &str) {
    text.extend_from_slice(key.as_bytes());
    text.push(b'=');
    text.extend_from_slice(value.as_bytes());
    text.push(0);
}

fn is_key(key: &[u8]) -> bool {
    let legal =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+' | b'@' | b'_' | b'#');
    (1..=KEY_BYTES).contains(&key.len()) && key.iter().all(legal)
}

/// A number, decimal or hexadecimal (`0x..`).
pub fn number(text: &str) -> Option<u32> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // `from_str_radix` accepts a sign, the protocol does not.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return None;
    }
    u32::from_str_radix(digits, radix).ok()
}

/// Binary data, hexadecimal (`0x..`) or base64 (`0b..`).
pub fn binary(text: &str) -> Option<Vec<u8>> {
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return from_hexadecimal(digits.as_bytes());
    }
    let digits = text.strip_prefix("0b").or_else(|| text.strip_prefix("0B"))?;
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(digits).ok().filter(|bytes| !bytes.is_empty())
}

fn from_hexadecimal(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = Vec::with_capacity(digits.len().div_ceil(2));
    // An odd number of digits has an implied zero in front.
    let (first, rest) = digits.split_at(digits.len() % 2);
    if let [odd] = first {
        bytes.push(digit(odd)?);
    }
    let (pairs, _) = rest.as_chunks::<2>();
    for [high, low] in pairs {
        bytes.push(digit(high)? << 4 | digit(low)?);
    }
    if bytes.is_empty() { None } else { Some(bytes) }
}

/// Binary data as hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::from("0x"), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_split_and_put_together() {
        let text = b"InitiatorName=iqn.x\0\0X-com.a.b=c=d\0MaxBurstLength=\0\0\0";
        let expected = vec![("InitiatorName", "iqn.x"), ("X-com.a.b", "c=d"), ("MaxBurstLength", "")];
        assert_eq!(pairs(text).unwrap(), expected);
        let mut again = Vec::new();
        for (key, value) in &expected {
            put_pair(&mut again, key, value);
        }
        assert_eq!(pairs(&again).unwrap(), expected);
        assert_eq!(pairs(b"").unwrap(), vec![]);
    }

    #[test]
    fn texts_that_are_no_pair_lists_are_refused() {
        let long = format!("A={}\0", "v".repeat(VALUE_BYTES + 1));
        let long_key = format!("{}=v\0", "k".repeat(64));
        for (text, error) in [
            (&b"A=b"[..], TextError::NoEnd),
            (b"A\0", TextError::NoEquals),
            (b"=b\0", TextError::BadKey),
            (b"A B=c\0", TextError::BadKey),
            (b"\xff=c\0", TextError::BadKey),
            (b"A=\xff\0", TextError::NotUtf8),
            (long.as_bytes(), TextError::LongValue),
            (long_key.as_bytes(), TextError::BadKey),
        ] {
            assert_eq!(pairs(text), Err(error));
        }
    }

    #[test]
    fn numbers_and_binary_values() {
        for (text, expected) in [
            ("0", Some(0)),
            ("262144", Some(262_144)),
            ("0x1F", Some(31)),
            ("4294967295", Some(u32::MAX)),
            ("4294967296", None),
            ("", None),
            ("0x", None),
            ("-1", None),
            ("+1", None),
            ("1 ", None),
        ] {
            assert_eq!(number(text), expected, "{text}");
        }
        assert_eq!(binary("0x0aFf"), Some(vec![10, 255]));
        assert_eq!(binary("0xabc"), Some(vec![0x0a, 0xbc]));
        assert_eq!(binary("0bAQID"), Some(vec![1, 2, 3]));
        for bad in ["", "0x", "0b", "12", "0xg0", "0b!", "0bAQI"] {
            assert_eq!(binary(bad), None, "{bad}");
        }
        assert_eq!(hexadecimal(&[0, 171]), "0x00ab");
    }
}
