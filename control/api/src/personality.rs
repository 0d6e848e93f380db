//! Personality strings: names and values that the guest of a machine reads. A machine has its own and those of its catalog.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::{Problem, ProblemKind};

/// The most characters of a name.
pub const PERSONALITY_NAME_CHARS: usize = 250;

/// The most characters of a value.
pub const PERSONALITY_VALUE_CHARS: usize = 1_000;

/// The most strings of one machine, and of one catalog.
pub const PERSONALITY_MAX: usize = 100;

/// The personality strings of a machine or a catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Personality {
    /// Its own, by name.
    pub strings: BTreeMap<String, String>,
    /// Those of the machine's catalog. Strings of the machine with the same names replace them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub of_catalog: BTreeMap<String, String>,
}

/// A change of personality strings. Guests read it from their next boot on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetPersonality {
    /// Strings to add or replace. A name has 1 to 250 characters and no `=`, a value at most 1000; neither has control characters.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// Names of strings to remove.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove: Vec<String>,
}

impl SetPersonality {
    /// The strings after this change.
    pub fn applied_to(&self, before: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Problem> {
        if self.set.is_empty() && self.remove.is_empty() {
            return Err(invalid("nothing to change was given".to_owned()));
        }
        let mut after = before.clone();
        for name in &self.remove {
            if after.remove(name).is_none() {
                let message = format!("there is no personality string '{}'", name.escape_debug());
                return Err(Problem::new(ProblemKind::NotFound, message));
            }
        }
        for (name, value) in &self.set {
            check(name, value)?;
            after.insert(name.clone(), value.clone());
        }
        match after.len() > PERSONALITY_MAX {
            true => Err(invalid(format!(
                "there would be {} personality strings, and at most {PERSONALITY_MAX} are allowed",
                after.len()
            ))),
            false => Ok(after),
        }
    }
}

/// Whether a character ends a line in YAML, or is not possible there: cloud-init would lose all strings.
fn is_odd_in_yaml(c: char) -> bool {
    matches!(c, '\u{2028}' | '\u{2029}' | '\u{fffe}' | '\u{ffff}')
}

fn check(name: &str, value: &str) -> Result<(), Problem> {
    let has_control = |text: &str| text.chars().any(|c| c.is_control() || is_odd_in_yaml(c));
    let is_plain = !name.contains('=') && name.trim() == name && !has_control(name);
    if !is_plain || !(1..=PERSONALITY_NAME_CHARS).contains(&name.chars().count()) {
        return Err(invalid(format!(
            "'{}' cannot be the name of a personality string: it has 1 to {PERSONALITY_NAME_CHARS} characters, no '=', no control characters, and \
             no blank at its ends",
            name.escape_debug()
        )));
    }
    if has_control(value) || value.chars().count() > PERSONALITY_VALUE_CHARS {
        return Err(invalid(format!(
            "the value of the personality string '{name}' cannot be used: it has at most {PERSONALITY_VALUE_CHARS} characters, and no control \
             characters"
        )));
    }
    Ok(())
}

fn invalid(message: String) -> Problem {
    Problem::new(ProblemKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn strings_are_added_replaced_and_removed() {
        let change = SetPersonality {
            set: strings(&[("room", "8"), ("url", "a=b c")]),
            remove: vec!["seat".to_owned()],
        };
        let before = strings(&[("room", "7"), ("seat", "1")]);
        assert_eq!(change.applied_to(&before).unwrap(), strings(&[("room", "8"), ("url", "a=b c")]));
        let unknown = change.applied_to(&strings(&[("room", "7")])).unwrap_err();
        assert_eq!(unknown.kind, ProblemKind::NotFound);
    }

    #[test]
    fn strings_that_a_guest_could_misread_are_refused() {
        let of =
            |name: &str, value: &str| SetPersonality { set: strings(&[(name, value)]), remove: Vec::new() };
        let none = BTreeMap::new();
        // Characters are counted, not bytes.
        let (name, value) = ("\u{e4}".repeat(250), "\u{e4}".repeat(1000));
        assert!(of(&name, &value).applied_to(&none).is_ok() && of("a b", "").applied_to(&none).is_ok());
        for (name, value) in [
            ("", "v"),
            ("a=b", "v"),
            (" a", "v"),
            ("a\n", "v"),
            (&*format!("{name}x"), "v"),
            ("a", "v\nb=c"),
            ("a\u{2028}b", "v"),
            ("a", "\u{ffff}"),
            ("a", &*format!("{value}x")),
        ] {
            assert_eq!(of(name, value).applied_to(&none).unwrap_err().kind, ProblemKind::Invalid, "{name:?}");
        }
        assert!(SetPersonality::default().applied_to(&none).is_err());
        let many: BTreeMap<_, _> = (0..=PERSONALITY_MAX).map(|n| (n.to_string(), String::new())).collect();
        assert!(SetPersonality { set: many, remove: Vec::new() }.applied_to(&none).is_err());
    }
}
