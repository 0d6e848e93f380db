//! Checks the text of names of machines and images, host names, MAC addresses and references to versions, makes names
//! from patterns, and orders names. Whether a name exists is checked by `control/service`.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::image::Channel;
use crate::problem::{Problem, ProblemKind};

/// The longest name of a machine or an image.
pub const MAX_NAME_BYTES: usize = 63;

/// Checks the name of a machine. It is also used as host name and directory name.
pub fn check_machine(name: &str) -> Result<(), Problem> {
    check_label("machine", name)
}

/// Checks the name of something (`what`) to which the rules for names of machines apply.
pub fn check_label(what: &str, name: &str) -> Result<(), Problem> {
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = name.as_bytes();
    let good = bytes.len() <= MAX_NAME_BYTES
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && edge(bytes.first())
        && edge(bytes.last());
    if good {
        return Ok(());
    }
    let message = format!("'{}' is not a {what} name", name.escape_debug());
    Err(Problem::new(ProblemKind::Invalid, message).advise(format!(
        "use 1 to {MAX_NAME_BYTES} of a-z, 0-9 and '-', with a letter or digit at the beginning and the end"
    )))
}

/// A pattern for the names of machines that are made alike: text with one run of `#` signs, which stand for the digits of a
/// number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRule {
    before: String,
    digits: usize,
    after: String,
}

impl NameRule {
    /// Parses a rule such as `class-##`. Names with at most as many digits as `#` signs must be valid names of machines.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let before: String = text.chars().take_while(|c| *c != '#').collect();
        let rest = text.get(before.len()..).unwrap_or_default();
        let after = rest.trim_start_matches('#');
        let digits = rest.len() - after.len();
        let rule = Self { before, digits, after: after.to_owned() };
        let is_sound = (1..=9).contains(&digits) && !after.contains('#');
        match check_machine(&rule.name(0)) {
            Ok(()) if is_sound => Ok(rule),
            _ => Err(Problem::new(
                ProblemKind::Invalid,
                format!("'{}' is not a pattern for names of machines", text.escape_debug()),
            )
            .advise(
                "write a name with 1 to 9 '#' signs in a row for the digits of a number, such as class-##",
            )),
        }
    }

    /// The name of the machine with a number. A number with more digits than `#` signs is written in full.
    pub fn name(&self, number: u32) -> String {
        format!("{}{number:0digits$}{}", self.before, self.after, digits = self.digits)
    }

    /// The number in a name that this rule made.
    pub fn number(&self, name: &str) -> Option<u32> {
        let number = name.strip_prefix(&self.before)?.strip_suffix(&self.after)?.parse().ok()?;
        (self.name(number) == name).then_some(number)
    }
}

/// The longest host name, with its dots.
pub const MAX_HOST_NAME_BYTES: usize = 253;

/// Checks a guest's host name: one label, or several with dots between them, of letters of either case.
pub fn check_host_name(name: &str) -> Result<(), Problem> {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        bytes.len() <= MAX_NAME_BYTES
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
            && edge(bytes.first())
            && edge(bytes.last())
    };
    if name.len() <= MAX_HOST_NAME_BYTES && name.split('.').all(is_label) {
        return Ok(());
    }
    let message = format!("'{}' is not a host name", name.escape_debug());
    Err(Problem::new(ProblemKind::Invalid, message).advise(format!(
        "use parts of 1 to {MAX_NAME_BYTES} letters, digits and '-', with a letter or digit at the beginning and the end and dots between \
         them, at most {MAX_HOST_NAME_BYTES} in all"
    )))
}

/// Checks a MAC address, and returns it in lower case with colons.
pub fn check_mac(text: &str) -> Result<String, Problem> {
    let lower = text.to_ascii_lowercase().replace('-', ":");
    let pairs: Vec<&str> = lower.split(':').collect();
    let is_pair = |pair: &&str| pair.len() == 2 && pair.bytes().all(|b| b.is_ascii_hexdigit());
    // The lowest bit of the first byte marks a multicast address.
    let is_unicast = lower.as_bytes().get(1).is_some_and(|digit| b"02468ace".contains(digit));
    if pairs.len() == 6 && pairs.iter().all(is_pair) && is_unicast && lower != "00:00:00:00:00:00" {
        return Ok(lower);
    }
    let message = format!("'{}' is not the MAC address of a network card", text.escape_debug());
    Err(Problem::new(ProblemKind::Invalid, message).advise(
        "write six pairs of hexadecimal digits, such as 52:54:00:12:34:56; the first byte must be even, and not all bytes \
         zero",
    ))
}

/// Checks the name of an image.
pub fn check_image(name: &str) -> Result<(), Problem> {
    let bytes = name.as_bytes();
    let good = bytes.len() <= MAX_NAME_BYTES
        && bytes.first().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        && bytes
            .iter()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.'));
    if good {
        return Ok(());
    }
    Err(Problem::new(ProblemKind::Invalid, format!("'{}' is not an image name", name.escape_debug())).advise(
        format!("use 1 to {MAX_NAME_BYTES} of a-z, 0-9, '-', '_' and '.', beginning with a letter or digit"),
    ))
}

/// A version of an image as people write it: `debian`, `debian:test`, `debian@3` or `debian@9f2c...` (the
/// beginning of its hash).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ImageRef {
    /// The image.
    pub image: String,
    /// The number, or first digits of the hash, after the `@`. It is checked where the reference is resolved that the digits suffice.
    pub version: Option<String>,
    /// The channel after the `:`. Without channel and version: `production` if it is set, else the newest generalised
    /// version.
    pub channel: Option<Channel>,
}

impl ImageRef {
    /// Reads and checks a reference.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let (image, version, channel) = match (text.split_once('@'), text.split_once(':')) {
            (Some((image, version)), _) => (image, Some(version), None),
            (None, Some((image, channel))) => (image, None, Some(channel)),
            (None, None) => (text, None, None),
        };
        check_image(image)?;
        if let Some(version) = version
            && (version.is_empty() || version.len() > 64 || !version.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            let message = format!("'{}' is not a version of an image", text.escape_debug());
            return Err(Problem::new(ProblemKind::Invalid, message).advise(
                "write IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH with at least eight digits of its hash",
            ));
        }
        let channel =
            channel.map(Channel::parse).transpose().map_err(|why| Problem::new(ProblemKind::Invalid, why))?;
        Ok(Self { image: image.to_owned(), version: version.map(str::to_owned), channel })
    }
}

impl std::fmt::Display for ImageRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.image)?;
        if let Some(version) = &self.version {
            write!(f, "@{version}")?;
        }
        self.channel.map_or(Ok(()), |channel| write!(f, ":{channel}"))
    }
}

/// Natural order of names: `pc-2` before `pc-10`.
pub fn natural(one: &str, other: &str) -> Ordering {
    let (mut a, mut b) = (one, other);
    loop {
        let (digits_a, digits_b) = (leading_digits(a), leading_digits(b));
        if digits_a > 0 && digits_b > 0 {
            let ((x, rest_a), (y, rest_b)) = (a.split_at(digits_a), b.split_at(digits_b));
            let value = |digits: &str| digits.trim_start_matches('0').len();
            // Of two numbers without leading zeroes the longer one is larger.
            let by_number = value(x)
                .cmp(&value(y))
                .then_with(|| x.trim_start_matches('0').cmp(y.trim_start_matches('0')));
            match by_number {
                Ordering::Equal => (a, b) = (rest_a, rest_b),
                unequal => return unequal,
            }
            continue;
        }
        let (mut rest_a, mut rest_b) = (a.chars(), b.chars());
        match (rest_a.next(), rest_b.next()) {
            (None, None) => return one.cmp(other),
            (x, y) if x == y => (a, b) = (rest_a.as_str(), rest_b.as_str()),
            (x, y) => return x.cmp(&y),
        }
    }
}

/// A key for databases: the byte order of the keys of two names is the [`natural`] order of the names.
///
/// A row of digits becomes `0`, its length without leading zeroes (one character), and its digits, because of two numbers the
/// longer one is larger. A blank, which sorts before all characters of names, and the name itself follow.
pub fn natural_key(name: &str) -> String {
    let (mut key, mut rest) = (String::new(), name);
    while let Some(first) = rest.chars().next() {
        let digits = leading_digits(rest);
        if digits > 0 {
            let (run, after) = rest.split_at(digits);
            let value = run.trim_start_matches('0');
            let len = u8::try_from(value.len()).unwrap_or(u8::MAX).min(b'~' - b'!');
            key.push('0');
            key.push(char::from(b'!' + len));
            key.push_str(value);
            rest = after;
        } else {
            key.push(first);
            rest = rest.get(first.len_utf8()..).unwrap_or_default();
        }
    }
    key.push(' ');
    key.push_str(name);
    key
}

fn leading_digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

/// Makes an image name from a file name: `My Disk.qcow2` becomes `my-disk`. `None`: no character of it is permitted in an
/// image name.
pub fn image_name_of(file_name: &str) -> Option<String> {
    let stem = file_name.rsplit_once('.').map_or(file_name, |(stem, _)| stem);
    let mut name = String::new();
    for c in stem.chars() {
        let c = c.to_ascii_lowercase();
        if c.is_ascii_lowercase() || c.is_ascii_digit() || (matches!(c, '_' | '.') && !name.is_empty()) {
            name.push(c);
        } else if !name.is_empty() && !name.ends_with('-') {
            name.push('-');
        }
        if name.len() == MAX_NAME_BYTES {
            break;
        }
    }
    let name = name.trim_end_matches(['-', '.', '_']);
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_names_machines_by_number() {
        let rule = NameRule::parse("class-##").unwrap();
        assert_eq!([1, 40, 123].map(|number| rule.name(number)), ["class-01", "class-40", "class-123"]);
        assert_eq!([rule.number("class-07"), rule.number("class-123")], [Some(7), Some(123)]);
        for other in ["class-7", "class-0123", "class-", "class-ab", "lab-07", "class-07x"] {
            assert_eq!(rule.number(other), None, "{other}");
        }
        assert_eq!(NameRule::parse("pc###x").unwrap().name(5), "pc005x");
        for odd in ["", "class", "#-#", "Class-#", "-#", "class-#-", "class-##########"] {
            assert!(NameRule::parse(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn machine_names_are_host_names() {
        for good in ["a", "web-1", "0", &"a".repeat(63)] {
            assert!(check_machine(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "..", "a b", "a\n", "\u{e4}", &"a".repeat(64)] {
            assert_eq!(check_machine(bad).unwrap_err().kind, ProblemKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn host_names_may_have_dots_and_upper_case_letters() {
        for good in
            ["a", "LAB-1", "lab.example.com", "4.a", &format!("{}.{}", "a".repeat(63), "b".repeat(63))]
        {
            assert!(check_host_name(good).is_ok(), "{good}");
        }
        let long = ["a"; 128].join(".");
        for bad in
            ["", ".", "a.", ".a", "a..b", "-a", "a-.b", "a_b", "a b", "a\n", "\u{e4}", &"a".repeat(64), &long]
        {
            assert_eq!(check_host_name(bad).unwrap_err().kind, ProblemKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn numbers_in_names_are_ordered_as_numbers() {
        let ordered =
            ["a", "pc", "pc-", "pc-01", "pc-1", "pc-1a", "pc-2", "pc-10", "pc-10-9", "pc-10-10", "pc-x", "q"];
        for (at, one) in ordered.iter().enumerate() {
            for (other_at, other) in ordered.iter().enumerate() {
                assert_eq!(natural(one, other), at.cmp(&other_at), "{one} {other}");
            }
        }
        let digits = "9".repeat(40);
        assert_eq!(natural(&digits, &format!("1{digits}")), Ordering::Less);
    }

    #[test]
    fn keys_of_names_have_the_natural_order() {
        let mut names: Vec<String> = Vec::new();
        let parts =
            ["pc", "a", "b", "0", "00", "1", "01", "2", "10", "9", "-", "-1", "-01", "x2y", "123456789012"];
        for one in parts {
            for other in parts {
                names.extend([one.to_owned(), format!("{one}{other}"), format!("{one}-{other}")]);
            }
        }
        for one in &names {
            for other in &names {
                let by_key = natural_key(one).cmp(&natural_key(other));
                assert_eq!(by_key, natural(one, other), "{one} {other}");
            }
        }
    }

    #[test]
    fn image_references_have_a_name_and_a_version() {
        let parsed = ImageRef::parse("debian@9f2c").unwrap();
        assert_eq!((parsed.image.as_str(), parsed.version.as_deref()), ("debian", Some("9f2c")));
        assert_eq!(ImageRef::parse("debian").unwrap().to_string(), "debian");
        let tested = ImageRef::parse("debian:test").unwrap();
        assert_eq!((tested.channel, tested.to_string().as_str()), (Some(Channel::Test), "debian:test"));
        for bad in ["", "@1", "a@", "a@x", "a@1@2", "a:", "a:x", "a:test@1", "../a", "a/b", ".a", "A"] {
            assert!(ImageRef::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn file_names_become_image_names() {
        for (file, name) in [
            ("debian-12.qcow2", "debian-12"),
            ("My Disk.img", "my-disk"),
            ("\u{fc}ber.raw", "ber"),
            ("--x--.raw", "x"),
        ] {
            assert_eq!(image_name_of(file).as_deref(), Some(name));
            assert!(check_image(name).is_ok());
        }
        assert!(check_image(&image_name_of(&"x".repeat(200)).unwrap()).is_ok());
        // These files would otherwise all become the same image.
        for file in ["...", ".hidden", "", "\u{65e5}\u{672c}.raw"] {
            assert_eq!(image_name_of(file), None, "{file}");
        }
    }

    #[test]
    fn addresses_of_single_cards_are_written_in_one_way() {
        assert_eq!(check_mac("52-54-00-AB-cd-0e").unwrap(), "52:54:00:ab:cd:0e");
        for wrong in ["", "52:54:00:ab:cd", "52:54:00:ab:cd:0e:01", "52:54:00:ab:cd:+e", "01:00:5e:00:00:01"]
        {
            assert!(check_mac(wrong).is_err(), "{wrong}");
        }
        assert!(check_mac("ff:ff:ff:ff:ff:ff").is_err() && check_mac("00:00:00:00:00:00").is_err());
    }
}
