//! Percent-encodes text for a URL or a form.

/// Encodes every byte except letters, digits and `-._~` as `%XX`.
pub(crate) fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn everything_special_is_escaped() {
        assert_eq!(escaped("2!8=+ ~a/"), "2%218%3D%2B%20~a%2F");
    }
}
