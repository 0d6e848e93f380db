//! Remembers which sizes Azure has refused, so that other machines do not request them again.
//!
//! | refusal | remembered for | how long |
//! |---|---|---|
//! | quota, with a limit of 0 | the family | 1 hour |
//! | quota | the family | 10 minutes |
//! | no capacity | the size in the zone | 1 hour |
//! | not offered | the size in the zone | 23 hours |

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{AzureError, AzureErrorKind};

const MINUTE: Duration = Duration::from_secs(60);

/// The most refusals that are remembered. Azure has about a thousand sizes and three zones.
const REFUSALS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<HashMap<Key, (Duration, String)>>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Family(String),
    SizeInZone(String, Option<String>),
}

/// Whether another size or zone may help after such an error.
pub(super) const fn is_about_size(kind: AzureErrorKind) -> bool {
    matches!(kind, AzureErrorKind::Quota | AzureErrorKind::Capacity | AzureErrorKind::NotOffered)
}

impl Memory {
    /// Remembers a refusal, and returns its reason. `None` if the error is about something else.
    pub(super) fn note(
        &self,
        now: Duration,
        size: &str,
        family: &str,
        zone: Option<&str>,
        error: &AzureError,
    ) -> Option<String> {
        let in_zone = || Key::SizeInZone(size.to_owned(), zone.map(str::to_owned));
        let (key, how_long, why) = match error.kind() {
            AzureErrorKind::Quota => {
                let quota = Quota::of(&error.to_string());
                let how_long = if quota.limit == Some(0) { 60 * MINUTE } else { 10 * MINUTE };
                (Key::Family(family.to_owned()), how_long, format!("quota of {family} used up{quota}"))
            }
            AzureErrorKind::Capacity => (in_zone(), 60 * MINUTE, "Azure had no free machine".to_owned()),
            AzureErrorKind::NotOffered => {
                (in_zone(), 23 * 60 * MINUTE, "not offered to this subscription".to_owned())
            }
            _ => return None,
        };
        let mut refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.retain(|_, (until, _)| *until > now);
        if refusals.len() < REFUSALS_MAX {
            refusals.insert(key, (now.saturating_add(how_long), why.clone()));
        }
        Some(why)
    }

    /// Why no size of a family is tried now.
    pub(super) fn of_family(&self, now: Duration, family: &str) -> Option<String> {
        self.refusal(now, &Key::Family(family.to_owned()))
    }

    /// Why a size is not tried in a zone now.
    pub(super) fn of_size(&self, now: Duration, size: &str, zone: Option<&str>) -> Option<String> {
        self.refusal(now, &Key::SizeInZone(size.to_owned(), zone.map(str::to_owned)))
    }

    fn refusal(&self, now: Duration, key: &Key) -> Option<String> {
        let refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (until, why) = refusals.get(key).filter(|(until, _)| *until > now)?;
        let minutes = until.saturating_sub(now).as_secs().div_ceil(60);
        Some(format!("{why}; tried again in {minutes} min"))
    }
}

/// The figures in Azure's message about a quota.
#[derive(Debug, Default, PartialEq, Eq)]
struct Quota {
    limit: Option<u64>,
    used: Option<u64>,
    needed: Option<u64>,
}

impl Quota {
    fn of(message: &str) -> Self {
        let number = |label: &str| {
            let (_, rest) = message.split_once(label)?;
            let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        };
        Self {
            limit: number("Current Limit:"),
            used: number("Current Usage:"),
            needed: number("Additional Required:"),
        }
    }
}

impl std::fmt::Display for Quota {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Some(limit), Some(used)) = (self.limit, self.used) else { return Ok(()) };
        write!(f, " ({used} of {limit} vCPUs used")?;
        if let Some(needed) = self.needed.filter(|needed| *needed > 0) {
            write!(f, ", room for {} more machines", limit.saturating_sub(used) / needed)?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_end_after_their_time() {
        let memory = Memory::default();
        let at = |minutes: u32| MINUTE * minutes;
        let note = |size: &str, family: &str, zone, kind, message: &str| {
            memory.note(at(0), size, family, zone, &AzureError::new(kind, message)).is_some()
        };
        assert!(note("D8", "D", Some("1"), AzureErrorKind::Capacity, ""));
        assert!(note("E8", "E", None, AzureErrorKind::NotOffered, ""));
        assert!(note("F8", "F", None, AzureErrorKind::Quota, "Current Limit: 10,"));
        assert!(note("G8", "G", None, AzureErrorKind::Quota, "Current Limit: 0,"));
        assert!(!note("H8", "H", None, AzureErrorKind::Denied, ""));
        let size = |minutes, size, zone| memory.of_size(at(minutes), size, zone).is_some();
        assert!(size(59, "D8", Some("1")) && !size(60, "D8", Some("1")));
        assert!(!size(1, "D8", Some("2")) && !size(1, "D8", None) && !size(0, "H8", None));
        assert!(size(23 * 60 - 1, "E8", None) && !size(23 * 60, "E8", None));
        let family = |minutes, family| memory.of_family(at(minutes), family).is_some();
        assert!(family(9, "F") && !family(10, "F") && family(59, "G") && !family(60, "G") && !family(0, "H"));
    }

    #[test]
    fn a_quota_says_how_many_machines_still_fit() {
        let message = "exceeding approved standardDSv5Family Cores quota. Current Limit: 100, Current Usage: 72, \
                       Additional Required: 8, (Minimum) New Limit Required: 108.";
        assert_eq!(Quota::of(message).to_string(), " (72 of 100 vCPUs used, room for 3 more machines)");
        assert_eq!(Quota::of("something else").to_string(), "");
    }
}
