//! How many replicas a version in a gallery has, and how many machines are created from them at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;

/// Microsoft recommends one replica for this many machines that are created at the same time.
pub const CREATIONS_PER_REPLICA: u32 = 20;

/// How long after a shrink the replicas become fewer.
const LOWER_AFTER: Duration = Duration::from_secs(3600);

/// The number of replicas in a region: one for each `ratio` machines, at least 1, at most `max`.
pub fn replicas(machines: u32, ratio: u32, max: u32) -> u32 {
    machines.div_ceil(ratio.max(1)).clamp(1, max.max(1))
}

/// A change of the number of replicas of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaStep {
    /// Nothing.
    Keep,
    /// An update of the version is in progress, and Azure does not permit a second.
    Wait,
    /// Change the number.
    Set(u32),
}

/// The next step from `current` to `wanted` replicas. More replicas are made at once, before machines are created;
/// fewer only if fewer were wanted for an hour (`fewer_for`), because an update of a version can take hours.
pub fn next_step(wanted: u32, current: u32, is_updating: bool, fewer_for: Duration) -> ReplicaStep {
    match wanted.cmp(&current) {
        std::cmp::Ordering::Equal => ReplicaStep::Keep,
        _ if is_updating => ReplicaStep::Wait,
        std::cmp::Ordering::Greater => ReplicaStep::Set(wanted),
        std::cmp::Ordering::Less if fewer_for >= LOWER_AFTER => ReplicaStep::Set(wanted),
        std::cmp::Ordering::Less => ReplicaStep::Keep,
    }
}

/// The replicas of a version that are complete in a region. `version` was read with `$expand=ReplicationStatus`.
pub fn ready_replicas(version: &Value, region: &str) -> u32 {
    let is_here = |entry: &&Value, field: &str| {
        let name = entry.get(field).and_then(Value::as_str).unwrap_or_default();
        plain(name) == plain(region)
    };
    let entries = |pointer: &str| version.pointer(pointer).and_then(Value::as_array).into_iter().flatten();
    let is_complete = entries("/properties/replicationStatus/summary")
        .find(|entry| is_here(entry, "region"))
        .is_some_and(|entry| entry.get("state").and_then(Value::as_str) == Some("Completed"));
    let target = entries("/properties/publishingProfile/targetRegions").find(|entry| is_here(entry, "name"));
    let count =
        target.and_then(|entry| entry.get("regionalReplicaCount")).and_then(Value::as_u64).unwrap_or(1);
    if is_complete && target.is_some() { u32::try_from(count).unwrap_or(u32::MAX) } else { 0 }
}

/// Azure shows a region as `West Europe` or as `westeurope`.
fn plain(region: &str) -> String {
    region.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_lowercase()
}

/// Limits the number of machines that are being created from one version.
#[derive(Debug, Default)]
pub(super) struct Gate {
    images: Mutex<HashMap<String, Creations>>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Creations {
    in_progress: u32,
    max: u32,
    /// When `max` was last read.
    read_at: Option<Duration>,
}

/// The permit for one creation.
#[derive(Debug)]
pub(super) struct Permit {
    gate: Arc<Gate>,
    image: String,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut images = self.gate.images.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(creations) = images.get_mut(&self.image) {
            creations.in_progress = creations.in_progress.saturating_sub(1);
            if creations.in_progress == 0 {
                // The next creation reads the number of replicas again.
                images.remove(&self.image);
            }
        }
        drop(images);
        self.gate.changed.notify_waiters();
    }
}

impl Gate {
    /// Whether the number of ready replicas was read within `max_age`.
    pub(super) fn is_known(&self, image: &str, now: Duration, max_age: Duration) -> bool {
        let images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        let read_at = images.get(image).and_then(|creations| creations.read_at);
        read_at.is_some_and(|at| now.saturating_sub(at) < max_age)
    }

    /// Sets the number of ready replicas.
    pub(super) fn set(&self, image: &str, now: Duration, ready: u32) {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        let creations = images.entry(image.to_owned()).or_default();
        creations.max = ready.saturating_mul(CREATIONS_PER_REPLICA);
        creations.read_at = Some(now);
        drop(images);
        self.changed.notify_waiters();
    }

    /// Waits until another creation may begin.
    pub(super) async fn enter(self: &Arc<Self>, image: &str) -> Permit {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(permit) = self.try_enter(image) {
                return permit;
            }
            changed.await;
        }
    }

    fn try_enter(self: &Arc<Self>, image: &str) -> Option<Permit> {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        let creations = images.entry(image.to_owned()).or_default();
        // An unknown number counts as one replica.
        let max = if creations.read_at.is_some() { creations.max } else { CREATIONS_PER_REPLICA };
        if creations.in_progress >= max.max(1) {
            return None;
        }
        creations.in_progress += 1;
        Some(Permit { gate: self.clone(), image: image.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn replicas_follow_the_machines() {
        let counts = [0, 1, 40, 41, 400, 401, 4000].map(|machines| replicas(machines, 40, 10));
        assert_eq!(counts, [1, 1, 1, 2, 10, 10, 10]);
        assert_eq!((replicas(10, 0, 0), replicas(u32::MAX, 1, 50)), (1, 50));
    }

    #[test]
    fn replicas_are_raised_at_once_and_lowered_after_an_hour() {
        let (soon, later) = (Duration::from_secs(3599), Duration::from_secs(3600));
        assert_eq!(next_step(3, 3, true, later), ReplicaStep::Keep);
        assert_eq!(next_step(4, 3, false, Duration::ZERO), ReplicaStep::Set(4));
        assert_eq!(next_step(4, 3, true, Duration::ZERO), ReplicaStep::Wait);
        assert_eq!(next_step(2, 3, false, soon), ReplicaStep::Keep);
        assert_eq!(next_step(2, 3, false, later), ReplicaStep::Set(2));
        assert_eq!(next_step(2, 3, true, later), ReplicaStep::Wait);
    }

    #[test]
    fn only_complete_replicas_of_the_region_count() {
        let version = |state: &str| {
            json!({"properties": {
                "publishingProfile": {"targetRegions": [
                    {"name": "North Europe", "regionalReplicaCount": 7},
                    {"name": "West Europe", "regionalReplicaCount": 3},
                ]},
                "replicationStatus": {"summary": [
                    {"region": "North Europe", "state": "Failed"},
                    {"region": "West Europe", "state": state},
                ]},
            }})
        };
        assert_eq!(ready_replicas(&version("Completed"), "westeurope"), 3);
        assert_eq!(ready_replicas(&version("Replicating"), "westeurope"), 0);
        assert_eq!(ready_replicas(&version("Completed"), "northeurope"), 0);
        assert_eq!(ready_replicas(&version("Completed"), "eastus"), 0);
        assert_eq!(ready_replicas(&json!({}), "westeurope"), 0);
    }

    #[tokio::test]
    async fn the_gate_admits_twenty_creations_for_each_replica() {
        let gate = Arc::new(Gate::default());
        gate.set("a", Duration::ZERO, 1);
        let mut permits = Vec::new();
        for _ in 0..20 {
            permits.push(gate.try_enter("a").unwrap());
        }
        assert!(gate.try_enter("a").is_none());
        let other = gate.try_enter("b").unwrap();
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter("a").await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        gate.set("a", Duration::ZERO, 2);
        permits.push(waiting.await.unwrap());
        for _ in 0..19 {
            permits.push(gate.try_enter("a").unwrap());
        }
        assert!(gate.try_enter("a").is_none());
        permits.pop();
        assert!(gate.try_enter("a").is_some());
        drop((permits, other));
        assert!(!gate.is_known("a", Duration::ZERO, Duration::from_secs(60)));
    }
}
