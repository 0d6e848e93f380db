//! File names as text that is safe to show.

use std::fmt::Write;

/// A name as text in which nothing steers a terminal or changes the order of the text around it. Control characters, marks of
/// writing direction and characters without a picture become `\u{..}`, bytes that are no UTF-8 become `\xNN`, and a backslash
/// is doubled.
pub fn escaped(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            // Writing to a string does not fail.
            let _ = match c {
                '\\' => out.write_str("\\\\"),
                c if is_unsafe(c) => write!(out, "\\u{{{:x}}}", u32::from(c)),
                c => out.write_char(c),
            };
        }
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_shown_as_a_number() {
        assert_eq!(escaped("/home/anna/\u{fc}ber uns.txt".as_bytes()), "/home/anna/\u{fc}ber uns.txt");
        assert_eq!(escaped(b"a\x1b[2Jb\n\\"), "a\\u{1b}[2Jb\\u{a}\\\\");
        assert_eq!(escaped("gpj.\u{202e}exe\u{2066}".as_bytes()), "gpj.\\u{202e}exe\\u{2066}");
        assert_eq!(escaped(b"\xff\xfe/\xc3"), "\\xff\\xfe/\\xc3");
        assert_eq!(escaped(&[b'n'; 255]), "n".repeat(255));
    }
}
