//! The history: who changed what, and when. An [`Event`] is one change, for `headwater events` and for auditors. (The
//! progress of a running operation is in [`crate::task_event`].)

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::words::size;

/// The most events of one answer. Older events are requested with `before`.
pub const MAX_EVENTS: u32 = 1000;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The number of the event. Later events have larger numbers.
    pub id: i64,
    /// When it happened.
    pub at_ms: u64,
    /// Who caused it: `uid 1000 (anna)` for a client of the socket, `uid 1000` if `/etc/passwd` has no name, `token NAME`,
    /// `oidc NAME (SUBJECT)` for a login, `tcp 127.0.0.1:5000` with the token of the data directory, or `daemon`.
    /// `console of ` before one of these means a session of the web console whose link that caller created.
    pub caller: String,
    /// The subject: `machine web-1`, `image debian`.
    pub subject: String,
    /// The action: `created`, `start`, `state`, ...
    pub action: String,
    /// A sentence that describes the event.
    pub detail: String,
    /// What a change of settings changed. Absent for other events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

/// The fields that a change of settings changed, before and after. The name of a field within a group has a dot: `cache.ram_bytes`. A field
/// that has no value is null. The values of secret fields are not shown: each is `given`, and `other` after a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// The values before.
    #[schema(value_type = Object)]
    pub before: BTreeMap<String, Value>,
    /// The values after.
    #[schema(value_type = Object)]
    pub after: BTreeMap<String, Value>,
}

/// The fields that may have passwords or keys.
const SECRET_FIELDS: [&str; 5] = ["hash", "password", "secret", "ssh_host_key_private", "user_data"];

impl Change {
    /// The fields that differ between two objects. `None`: none differs.
    pub fn between(before: &impl Serialize, after: &impl Serialize) -> Option<Self> {
        let (before, after) = (fields_of(before), fields_of(after));
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let mut change = Self::default();
        for name in names {
            let value = |of: &BTreeMap<String, Value>| of.get(name).cloned().unwrap_or(Value::Null);
            let (old, new) = (value(&before), value(&after));
            if old == new {
                continue;
            }
            let is_secret = name.rsplit('.').next().is_some_and(|field| SECRET_FIELDS.contains(&field));
            let (old, new) = if is_secret { hidden(old, new) } else { (old, new) };
            change.before.insert(name.clone(), old);
            change.after.insert(name.clone(), new);
        }
        (!change.before.is_empty()).then_some(change)
    }

    /// A change of one field. `None`: it has the same value.
    pub fn of(field: &str, before: impl Into<Value>, after: impl Into<Value>) -> Option<Self> {
        let object = |value: Value| Value::Object(Map::from_iter([(field.to_owned(), value)]));
        Self::between(&object(before.into()), &object(after.into()))
    }

    /// As JSON.
    pub fn to_text(&self) -> String {
        // Text keys and values that came from JSON can be written.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From JSON. `None`: that is none.
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// In words: `ram 64 MiB -> 256 MiB, cpus 1 -> 2`.
    pub fn in_words(&self) -> String {
        let words = self.before.iter().map(|(name, before)| {
            let after = self.after.get(name).unwrap_or(&Value::Null);
            match name.strip_suffix("_bytes") {
                Some(short) => format!("{short} {} -> {}", size_words(before), size_words(after)),
                None => {
                    format!("{} {} -> {}", name.replace('_', " "), value_words(before), value_words(after))
                }
            }
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

/// The fields of an object, by name. Those of objects within have both names.
fn fields_of(object: &impl Serialize) -> BTreeMap<String, Value> {
    fn add(fields: &mut BTreeMap<String, Value>, prefix: &str, object: Map<String, Value>) {
        for (name, value) in object {
            let name = format!("{prefix}{name}");
            match value {
                Value::Object(within) => add(fields, &format!("{name}."), within),
                value => drop(fields.insert(name, value)),
            }
        }
    }
    let mut fields = BTreeMap::new();
    if let Ok(Value::Object(object)) = serde_json::to_value(object) {
        add(&mut fields, "", object);
    }
    fields
}

/// Whether secret values were given.
fn hidden(before: Value, after: Value) -> (Value, Value) {
    let is_other = !before.is_null();
    let word = |value: Value, word: &str| if value.is_null() { value } else { word.into() };
    (word(before, "given"), word(after, if is_other { "other" } else { "given" }))
}

fn size_words(value: &Value) -> String {
    value.as_u64().map_or_else(|| value_words(value), size)
}

fn value_words(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => values.iter().map(value_words).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

/// A list of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Newest first, or oldest first if they were asked for by `after`.
    pub events: Vec<Event>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_has_only_the_fields_that_differ() {
        let before = json!({ "ram_bytes": 64 << 20, "cpus": 1, "cache": { "weight": 100, "mode": "ram" }, "pin": null });
        let after = json!({ "ram_bytes": 256 << 20, "cpus": 1, "cache": { "weight": 50, "mode": "ram" }, "pin": "a@2" });
        let change = Change::between(&before, &after).unwrap();
        let expected = json!({
            "before": { "cache.weight": 100, "pin": null, "ram_bytes": 64 << 20 },
            "after": { "cache.weight": 50, "pin": "a@2", "ram_bytes": 256 << 20 },
        });
        assert_eq!(serde_json::to_value(&change).unwrap(), expected);
        assert_eq!(change.in_words(), "cache.weight 100 -> 50, pin none -> a@2, ram 64 MiB -> 256 MiB");
        assert_eq!(Change::parse(&change.to_text()), Some(change));
        assert_eq!(Change::between(&before, &before), None);
        assert_eq!(Change::of("cordoned", true, true), None);
    }

    #[test]
    fn a_change_shows_no_secrets() {
        for field in SECRET_FIELDS {
            let of = |value: Value| json!({ "nested": { field: value } });
            for (before, after, words) in [
                (Value::Null, "pa55".into(), "none -> given"),
                ("pa55".into(), "pa56".into(), "given -> other"),
                ("pa55".into(), Value::Null, "given -> none"),
            ] {
                let change = Change::between(&of(before), &of(after)).unwrap();
                assert!(
                    !change.to_text().contains("pa5") && change.in_words().ends_with(words),
                    "{change:?}"
                );
            }
        }
    }
}
