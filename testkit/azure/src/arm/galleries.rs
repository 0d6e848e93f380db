//! Versions of images in a gallery: their source, and their replicas in regions.

use serde_json::{Value, json};

use super::management::Management;
use super::{Refusal, refuse};

impl Management {
    /// Checks a new version: its source must be a disk with a complete upload.
    pub(super) fn check_version(&self, version: &Value) -> Result<(), Refusal> {
        let source =
            version.pointer("/properties/storageProfile/osDiskImage/source/id").and_then(Value::as_str);
        let Some(disk) = source.and_then(|id| self.resources.get(id)) else {
            return refuse(404, "ResourceNotFound", "the source of the version was not found");
        };
        let state = disk.pointer("/properties/diskState").and_then(Value::as_str);
        if state.is_some_and(|state| state != "Unattached") {
            let what = format!("the disk is in state {}", state.unwrap_or_default());
            return refuse(409, "OperationNotAllowed", what);
        }
        Ok(())
    }

    /// Whether all replicas of a version exist.
    fn is_replicated(&self, path: &str) -> bool {
        self.replication.get(path).copied().unwrap_or_default() >= self.replication_looks
    }

    /// The replicas of a version in the region that are ready.
    pub(super) fn ready_replicas(&self, path: &str) -> usize {
        let version = self.resources.get(path).filter(|_| self.is_replicated(path));
        let regions = version.and_then(|it| it.pointer("/properties/publishingProfile/targetRegions"));
        let here = |region: &&Value| region["name"].as_str() == Some(self.region.as_str());
        let region = regions.and_then(Value::as_array).and_then(|it| it.iter().find(here));
        let count = region.and_then(|it| it["regionalReplicaCount"].as_u64()).unwrap_or_default();
        usize::try_from(count).unwrap_or_default()
    }

    /// Adds the progress of the replicas.
    pub(super) fn show_replication(&mut self, path: &str, shown: &mut Value) {
        *self.replication.entry(path.to_owned()).or_default() += 1;
        let is_ready = self.is_replicated(path) && shown["properties"]["provisioningState"] == "Succeeded";
        let (state, progress) = if is_ready { ("Completed", 100) } else { ("Replicating", 50) };
        let regions = shown.pointer("/properties/publishingProfile/targetRegions").and_then(Value::as_array);
        let summary: Vec<Value> = regions
            .into_iter()
            .flatten()
            .map(|region| json!({"region": region["name"], "state": state, "progress": progress, "details": ""}))
            .collect();
        let aggregated = if is_ready { "Completed" } else { "InProgress" };
        shown["properties"]["replicationStatus"] = json!({"aggregatedState": aggregated, "summary": summary});
    }
}
