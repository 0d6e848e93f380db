//! A source file as rules see it: its text, its code without comments and strings, and which lines are tests.
//!
//! The code view has the same length and the same lines as the text; bytes of comments and literals are
//! blanks. So a rule searches `code` with plain string search and reports the line in `text`.

/// One file of the tree.
pub struct SourceFile {
    /// Path from the root of the workspace, with `/`.
    pub path: String,
    /// The whole text.
    pub text: String,
    /// The text with comments, strings and characters blanked (Rust files only; otherwise empty).
    pub code: String,
    tests: Vec<bool>,
}

impl SourceFile {
    /// Analyses a file.
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let code = if path.ends_with(".rs") { blank_literals(&text) } else { String::new() };
        let tests = test_lines(&path, &code);
        Self { path, text, code, tests }
    }

    /// Whether this is a Rust source.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The line (from 1) on which byte `at` lies.
    pub fn line_of(&self, at: usize) -> usize {
        self.text.as_bytes()[..at].iter().filter(|b| **b == b'\n').count() + 1
    }

    /// Whether the line (from 1) is only compiled for tests, benchmarks or examples.
    pub fn is_test(&self, line: usize) -> bool {
        self.tests.get(line - 1).copied().unwrap_or(false)
    }

    /// Lines (from 1) of code in which `word` occurs as a whole word, outside tests.
    pub fn lines_with(&self, word: &str) -> Vec<usize> {
        let lines = self.code.lines().enumerate();
        lines
            .filter(|(_, line)| has_word(line, word))
            .map(|(index, _)| index + 1)
            .filter(|line| !self.is_test(*line))
            .collect()
    }
}

/// Whether `word` occurs in `line` with no identifier character next to its ends.
pub fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let joined_before = word.starts_with(|c: char| c.is_alphanumeric()) && joins(before);
        let joined_after = word.ends_with(|c: char| c.is_alphanumeric()) && joins(after);
        !joined_before && !joined_after
    })
}

/// Finds the `}` that closes the first `{` at or after `from`; `None` if a `;` comes first.
pub fn body_end(code: &str, from: usize) -> Option<usize> {
    let (mut braces, mut parens) = (0_usize, 0_usize);
    for (at, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'(' | b'[' => parens += 1,
            b')' | b']' => parens = parens.saturating_sub(1),
            b'{' => braces += 1,
            b'}' => {
                braces = braces.saturating_sub(1);
                if braces == 0 {
                    return Some(at);
                }
            }
            b';' if braces == 0 && parens == 0 => return None,
            _ => {}
        }
    }
    None
}

fn test_lines(path: &str, code: &str) -> Vec<bool> {
    let in_test_folder =
        ["tests", "benches", "examples"].iter().any(|folder| path.split('/').any(|p| p == *folder));
    let whole = in_test_folder || path.ends_with("/tests.rs") || code.contains("#![cfg(test)]");
    let mut tests = vec![whole; code.lines().count()];
    for marker in ["#[cfg(test)]", "#[test]", "#[tokio::test"] {
        for (at, _) in code.match_indices(marker) {
            let end = body_end(code, at + marker.len()).unwrap_or(at);
            let first = code[..at].matches('\n').count();
            let last = code[..end].matches('\n').count();
            tests[first..=last].fill(true);
        }
    }
    tests
}

/// Replaces every byte of a comment, string or character literal by a blank, except line ends.
fn blank_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let Some(len) = literal_len(bytes, at) else {
            at += 1;
            continue;
        };
        let end = (at + len).min(bytes.len());
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    // Blanking whole literals leaves ASCII blanks or untouched characters: always valid UTF-8.
    String::from_utf8_lossy(&code).into_owned()
}

/// Length of the comment or literal that starts at `at`, if one does.
fn literal_len(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let after_identifier = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => Some(rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len())),
        [b'/', b'*', ..] => Some(block_comment_len(rest)),
        [b'"', ..] => Some(quoted_len(rest, b'"')),
        [b'r', b'"' | b'#', ..] if !after_identifier => raw_string_len(rest, 1),
        [b'b' | b'c', b'r', b'"' | b'#', ..] if !after_identifier => raw_string_len(rest, 2),
        [b'\'', b'\\', ..] => Some(quoted_len(rest, b'\'')),
        // A lifetime has no quote after its first character; a character may take up to four bytes.
        [b'\'', ..] => (2..=5)
            .find(|i| rest.get(*i) == Some(&b'\''))
            .filter(|i| is_one_char(&rest[1..*i]))
            .map(|i| i + 1),
        _ => None,
    }
}

fn is_one_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|s| s.chars().count() == 1)
}

fn block_comment_len(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                at += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string_len(rest: &[u8], prefix: usize) -> Option<usize> {
    let hashes = rest[prefix..].iter().take_while(|b| **b == b'#').count();
    if rest.get(prefix + hashes) != Some(&b'"') {
        return None; // A raw identifier such as `r#type`.
    }
    let mut close = vec![b'#'; hashes + 1];
    close[0] = b'"';
    let body = prefix + hashes + 1;
    let end = rest[body..].windows(close.len()).position(|w| w == close);
    Some(end.map_or(rest.len(), |end| body + end + close.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blank_and_code_is_not() {
        let text = concat!(
            "let a = \"x.unwrap()\"; // y.unwrap()\n",
            "/* b /* nested */ unwrap */ let c = 'u'; let d = b'\\''; fn e<'a>(f: &'a str) {}\n",
            "let g = r#\"h \" unwrap\"#; let r#type = \"\\\"unwrap\"; i.unwrap();\n",
        );
        let file = SourceFile::new("a.rs", text);
        assert_eq!(file.code.len(), text.len());
        assert_eq!(file.code.matches("unwrap").count(), 1);
        assert!(file.code.contains("fn e<'a>(f: &'a str) {}"));
        assert!(file.code.contains("r#type"));
        assert_eq!(file.lines_with("unwrap"), vec![3]);
    }

    #[test]
    fn test_code_is_known_by_attribute_and_by_folder() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n  fn b() {}\n}\nfn c() {}\n";
        let file = SourceFile::new("x/src/a.rs", text);
        let tests: Vec<bool> = (1..=6).map(|line| file.is_test(line)).collect();
        assert_eq!(tests, [false, true, true, true, true, false]);
        assert!(SourceFile::new("x/tests/a.rs", text).is_test(1));
        assert!(!SourceFile::new("x/src/a.rs", "#[cfg(test)]\nmod model;\nfn c() {}\n").is_test(3));
    }

    #[test]
    fn words_are_whole_words() {
        assert!(has_word("unsafe { }", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
        assert!(has_word("a.unwrap()", ".unwrap()"));
    }
}
