//! Names of images, and the texts with which people refer to one of their versions, such as `debian@3`.
//! Parses and checks them; whether they exist is for a store to say.

use crate::error::{StoreError, StoreErrorKind};
use crate::refs::Channel;

/// The longest image name, in characters.
pub const NAME_MAX: usize = 63;

/// A checked image name: `[a-z0-9][a-z0-9._-]{0,62}`. Safe as a file name and in a URL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ImageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for ImageName {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let invalid = |why: String| {
            StoreError::new(
                StoreErrorKind::Invalid,
                format!(
                    "'{}' is not an image name: {why}. A name has 1 to {NAME_MAX} characters a-z, 0-9, '.', '_' \
                     or '-', and starts with a letter or digit",
                    text.escape_debug()
                ),
            )
        };
        let Some(first) = text.chars().next() else {
            return Err(invalid("it is empty".into()));
        };
        let odd = text.chars().find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-'));
        if let Some(odd) = odd {
            let hint = if odd.is_ascii_uppercase() { " (capitals are not allowed)" } else { "" };
            return Err(invalid(format!("it contains '{}'{hint}", odd.escape_debug())));
        }
        if !first.is_ascii_alphanumeric() {
            return Err(invalid(format!("it starts with '{first}'")));
        }
        if text.len() > NAME_MAX {
            return Err(invalid(format!("it has {} characters", text.len())));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Which version of an image is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The version that `production` points to. If production was never set, the newest version that is not
    /// retired.
    Default,
    /// The version that this channel points to.
    Channel(Channel),
    /// The version with this number.
    Number(u32),
    /// The version whose hash starts with these hexadecimal digits (at least [`HASH_PREFIX_MIN`]).
    HashPrefix(String),
}

/// The shortest hash prefix that selects a version, in digits. A shorter one could be taken for a number.
pub const HASH_PREFIX_MIN: usize = 8;

/// `IMAGE`, `IMAGE:test`, `IMAGE@3` or `IMAGE@0123abcd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageReference {
    /// The image.
    pub name: ImageName,
    /// Its version.
    pub selector: Selector,
}

impl std::str::FromStr for ImageReference {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        if let Some((name, version)) = text.split_once('@') {
            return Ok(Self { name: name.parse()?, selector: version.parse()? });
        }
        if let Some((name, channel)) = text.split_once(':') {
            return Ok(Self { name: name.parse()?, selector: Selector::Channel(channel.parse()?) });
        }
        Ok(Self { name: text.parse()?, selector: Selector::Default })
    }
}

impl std::str::FromStr for Selector {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        if (1..HASH_PREFIX_MIN).contains(&text.len())
            && digits
            && let Ok(number @ 1..) = text.parse()
        {
            return Ok(Self::Number(number));
        }
        let hex = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if (HASH_PREFIX_MIN..=64).contains(&text.len()) && hex {
            return Ok(Self::HashPrefix(text.to_owned()));
        }
        Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "'{}' is not a version: write its number, from 1, or at least the first {HASH_PREFIX_MIN} \
                 hexadecimal digits of its hash",
                text.escape_debug()
            ),
        ))
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Channel(channel) => write!(f, "{channel}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::HashPrefix(prefix) => f.write_str(prefix),
        }
    }
}

impl std::fmt::Display for ImageReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.selector {
            Selector::Default => write!(f, "{}", self.name),
            Selector::Channel(channel) => write!(f, "{}:{channel}", self.name),
            other => write!(f, "{}@{other}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_allowed() {
        for good in ["a", "0", "debian-12.x_64", &"a".repeat(63)] {
            assert_eq!(good.parse::<ImageName>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn odd_names_are_refused_and_the_oddity_is_named() {
        for (bad, names) in [
            ("", "empty"),
            ("Debian", "capitals"),
            ("a/b", "contains '/'"),
            ("..", "starts with '.'"),
            ("-x", "starts with '-'"),
            ("a b", "contains ' '"),
            ("a\0", "contains '\\0'"),
            ("caf\u{e9}", "contains"),
            (&"a".repeat(64), "64 characters"),
        ] {
            let error = bad.parse::<ImageName>().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Invalid);
            assert!(error.to_string().contains(names), "{bad:?}: {error}");
        }
    }

    #[test]
    fn references_select_by_number_and_by_hash() {
        let parse = |text: &str| text.parse::<ImageReference>().map(|r| r.selector);
        assert_eq!(parse("deb").unwrap(), Selector::Default);
        assert_eq!(parse("deb:test").unwrap(), Selector::Channel(Channel::Test));
        assert_eq!(parse("deb@3").unwrap(), Selector::Number(3));
        assert_eq!(parse("deb@01234567").unwrap(), Selector::HashPrefix("01234567".into()));
        for bad in [
            "deb@",
            "deb@0",
            "deb@-1",
            "deb@abc",
            "deb@0123456G",
            "@3",
            "deb@3@4",
            "deb:",
            "deb:x",
            "deb:test@1",
            ":test",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
