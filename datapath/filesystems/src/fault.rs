//! Why something of a file system cannot be read.

/// A reason in a few words, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub String);

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

/// A fault in a few words.
pub fn fault(why: impl std::fmt::Display) -> Fault {
    Fault(why.to_string())
}
