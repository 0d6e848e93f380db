//! iSCSI names: `iqn.2026-01.org.example:disk`, `eui.` with 16 hexadecimal digits, `naa.` with 16 or 32.

use std::str::FromStr;

/// Longest name in bytes.
pub const NAME_BYTES: usize = 223;

/// The name of an initiator or a target, in lower case: the protocol ignores case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IscsiName(String);

/// A text that is not an iSCSI name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{}' is not an iSCSI name: {why}; write for instance iqn.2026-01.org.example:disk1", .text.escape_debug())]
pub struct NameError {
    text: String,
    why: &'static str,
}

impl IscsiName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for IscsiName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for IscsiName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        check(text)
            .map(|()| Self(text.to_lowercase()))
            // The text is cut, so that a hostile name cannot fill a log.
            .map_err(|why| NameError { text: text.chars().take(NAME_BYTES).collect(), why })
    }
}

fn check(text: &str) -> Result<(), &'static str> {
    if text.len() > NAME_BYTES {
        return Err("it is longer than 223 bytes");
    }
    let lower = text.to_lowercase();
    if let Some(rest) = lower.strip_prefix("iqn.") {
        // Letters outside ASCII are legal in names; separators and invisible characters are not.
        let legal = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | ':' | '_');
        if !rest.chars().all(legal) {
            return Err("it has characters other than letters, digits, '-', '_', '.' and ':'");
        }
        let Some((date, authority)) = rest.split_once('.') else {
            return Err(
                "after iqn. it needs a year and month and a domain name, such as iqn.2026-01.org.example",
            );
        };
        let is_date = date.len() == 7
            && date.bytes().enumerate().all(|(at, byte)| match at {
                4 => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        if !is_date {
            return Err("after iqn. it needs a year and month, such as iqn.2026-01.org.example");
        }
        if authority.is_empty() || authority.starts_with(':') {
            return Err("the domain name is missing");
        }
        return Ok(());
    }
    let (digits, lengths) = match (lower.strip_prefix("eui."), lower.strip_prefix("naa.")) {
        (Some(digits), _) => (digits, [16, 16]),
        (_, Some(digits)) => (digits, [16, 32]),
        _ => return Err("it starts with neither iqn. nor eui. nor naa."),
    };
    if lengths.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        Ok(())
    } else {
        Err("after eui. come 16 hexadecimal digits, after naa. 16 or 32")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_lowered() {
        for good in [
            "iqn.2026-01.org.example",
            "iqn.1991-05.com.microsoft:pc-1",
            "iqn.1993-08.org.debian:01:af",
            "eui.02004567A425678D",
            "naa.52004567ba64678d",
            "naa.62004567ba64678d0123456789abcdef",
        ] {
            assert_eq!(good.parse::<IscsiName>().unwrap().as_str(), good.to_lowercase());
        }
        let long = format!("iqn.2026-01.org.example:{}", "x".repeat(200));
        for bad in [
            "",
            "disk",
            "iqn.",
            "iqn.2026-01",
            "iqn.2026-01.",
            "iqn.2026-01.:x",
            "iqn.202601.org.example",
            "iqn.2026-01.org.example:a b",
            "iqn.2026-01.org.example:a/b",
            "iqn.2026-01.org.example:\n",
            "eui.1",
            "naa.zz004567ba64678d",
            &long,
        ] {
            assert!(bad.parse::<IscsiName>().is_err(), "{bad}");
        }
    }
}
