//! Requests and reports of operations on all machines of a catalog: `scale` changes how many there are, `roll` brings
//! them to a version. `control/service` carries them out as tasks.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

use crate::hours::Hours;
use crate::machine_list::ListedMachine;

/// The request to change the number of machines of a catalog: either `count` or `machines` is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScaleRequest {
    /// The number of machines that the catalog is to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Machines that the catalog is to have in addition: at most 10,000.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machines: Vec<ListedMachine>,
    /// Start the machines that are created, and those of `machines` that exist already.
    #[serde(default)]
    pub start: bool,
    /// If there are not enough other machines, also remove claimed and pinned machines, and machines with a persistent
    /// disk. Machines with a maintenance session always stay.
    #[serde(default)]
    pub force: bool,
}

/// The result of scaling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScaleReport {
    /// The catalog.
    pub catalog: String,
    /// The machines that were created.
    pub created: Vec<String>,
    /// The machines that were removed.
    pub removed: Vec<String>,
    /// The number of machines of the catalog after the change.
    pub count: u32,
}

/// How many machines a roll moves at once: a number, or a percentage of the machines that are on, such as `10%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// A number of machines.
    Machines(u32),
    /// A percentage of the machines, rounded down, but at least one machine.
    Percent(u32),
}

impl Batch {
    /// Parses `5` or `10%`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (digits, is_share) = text.strip_suffix('%').map_or((text, false), |digits| (digits, true));
        match (digits.parse::<u32>(), is_share) {
            (Ok(share @ 1..=100), true) => Ok(Self::Percent(share)),
            (Ok(number @ 1..), false) => Ok(Self::Machines(number)),
            _ => Err(format!(
                "'{text}' is not a batch size: give a number of machines, 1 or more, or a percentage of them, 1% to 100%"
            )),
        }
    }

    /// The batch size for this number of machines.
    pub fn of(self, machines: usize) -> usize {
        let count = match self {
            Self::Machines(count) => usize::try_from(count).unwrap_or(usize::MAX),
            Self::Percent(share) => machines.saturating_mul(usize::try_from(share).unwrap_or(100)) / 100,
        };
        count.max(1)
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::Percent(10)
    }
}

impl std::fmt::Display for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Machines(count) => write!(f, "{count}"),
            Self::Percent(share) => write!(f, "{share}%"),
        }
    }
}

impl Serialize for Batch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_string())
    }
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

impl utoipa::PartialSchema for Batch {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        String::schema()
    }
}

impl ToSchema for Batch {}

/// The version that a catalog's machines are to run, and how they are moved to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollRequest {
    /// `IMAGE@NUMBER`, or a channel, which is resolved once, now.
    pub to: String,
    /// The number of machines that are moved first. The roll continues only if they are healthy. 0: none.
    #[serde(default = "RollRequest::default_canary")]
    pub canary: u32,
    /// How many of the other machines are moved at once.
    #[serde(default)]
    pub batch: Batch,
    /// How long to wait after a batch, in seconds.
    #[serde(default)]
    pub pause_s: u64,
    /// A shell command in the guest that exits with 0 if the machine is healthy. Absent: a machine that has booted is
    /// healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
    /// The timeout of the health command, in seconds.
    #[serde(default = "RollRequest::default_health_s")]
    pub health_s: u64,
    /// The timeout of a machine's boot, in seconds.
    #[serde(default = "RollRequest::default_boot_s")]
    pub boot_s: u64,
    /// How many machines besides the canaries may fail before all machines are moved back.
    #[serde(default)]
    pub max_failures: u32,
    /// No machine is moved before this time, in milliseconds since 1970 UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_ms: Option<u64>,
    /// The hours in which machines are moved, such as `sun 02:00-05:00 Europe/Berlin`. Without a time zone, that of the
    /// daemon's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Hours>,
    /// If somebody is logged in to a machine, it is restarted when nobody is, or after this time, in seconds. Absent: machines are
    /// restarted at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_idle_s: Option<u64>,
    /// The message that users of such a machine see when the machine begins to wait, and again when more users log in: 1 to 1000
    /// characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The time after which no machine waits any more, in seconds: machines that are in use then are not restarted. It begins when the
    /// roll asks the first machine, and again in each window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<u64>,
}

impl RollRequest {
    /// One machine.
    pub const fn default_canary() -> u32 {
        1
    }

    /// One minute.
    pub const fn default_health_s() -> u64 {
        60
    }

    /// Ten minutes.
    pub const fn default_boot_s() -> u64 {
        600
    }
}

/// A machine, and why a task did not move it or why it is not healthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftMachine {
    /// Its name.
    pub machine: String,
    /// Why.
    pub why: String,
}

/// The result of a roll.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RollReport {
    /// The catalog.
    pub catalog: String,
    /// The version that its machines ran before the roll.
    pub from: String,
    /// The version that they run now.
    pub to: String,
    /// The machines that were moved and are healthy.
    pub moved: Vec<String>,
    /// The machines that were moved and are not healthy: at most `max_failures` of the request.
    pub failed: Vec<LeftMachine>,
    /// The machines that were not moved.
    pub left: Vec<LeftMachine>,
    /// Whether the roll pinned the catalog to the version. It does not if the catalog's image already resolves to that
    /// version.
    pub pinned: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_numbers_or_shares() {
        for text in ["1", "25", "1%", "100%"] {
            assert_eq!(Batch::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "0", "0%", "101%", "-1", "1.5", "%", "ten"] {
            assert!(Batch::parse(text).is_err(), "{text}");
        }
        let of = |text: &str, machines| Batch::parse(text).unwrap().of(machines);
        assert_eq!([of("10%", 40), of("10%", 9), of("5", 3), of("100%", 0)], [4, 1, 5, 1]);
        assert_eq!(serde_json::to_string(&Batch::default()).unwrap(), "\"10%\"");
    }

    #[test]
    fn a_request_needs_only_its_version() {
        let request: RollRequest = serde_json::from_str(r#"{"to":"debian@7"}"#).unwrap();
        assert_eq!((request.canary, request.batch, request.max_failures), (1, Batch::Percent(10), 0));
        assert!(serde_json::from_str::<RollRequest>(r#"{"to":"debian@7","batch":"0"}"#).is_err());
    }
}
