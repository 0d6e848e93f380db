//! Managed disks that wait for an upload: their state, the URL for writing, and the check of the upload.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use super::management::Management;
use super::operations::{Effect, Operation};
use super::{Call, Refusal, Reply, refuse};
use crate::blob::Blob;

/// The first bytes of the footer of a VHD.
const COOKIE: &[u8] = b"conectix";

impl Management {
    /// Creates the blob of a disk for an upload.
    pub(super) fn begin_disk(&mut self, disk: &mut Value) {
        let data = &disk["properties"]["creationData"];
        if data["createOption"].as_str() != Some("Upload") {
            return;
        }
        let len = data["uploadSizeBytes"].as_u64().unwrap_or_default();
        let blob = Blob { made: Some((len, String::new())), list_max: 1000, ..Blob::default() };
        self.blobs.push(Arc::new(Mutex::new(blob)));
        disk["properties"]["diskState"] = "ReadyToUpload".into();
        disk["properties"]["uniqueId"] = (self.blobs.len() - 1).to_string().into();
    }

    /// `beginGetAccess` and `endGetAccess`.
    pub(super) fn access(&mut self, call: &Call<'_>, path: &str, verb: &str) -> Result<Reply, Refusal> {
        let Some(disk) = self.resources.get_mut(path) else {
            return refuse(404, "ResourceNotFound", "no disk");
        };
        let number = disk["properties"]["uniqueId"].as_str().and_then(|it| it.parse::<usize>().ok());
        let Some((number, blob)) = number.and_then(|number| Some((number, self.blobs.get(number)?.clone())))
        else {
            return refuse(409, "OperationNotAllowed", "the disk was not created for an upload");
        };
        let mut blob = blob.lock().unwrap_or_else(PoisonError::into_inner);
        let state = disk["properties"]["diskState"].as_str().unwrap_or_default().to_owned();
        if verb == "beginGetAccess" {
            if state == "Unattached" {
                return refuse(409, "OperationNotAllowed", "the upload of the disk has ended");
            }
            disk["properties"]["diskState"] = "ActiveUpload".into();
            let url = format!("{}/blobs/{number}?sv=2021-12-02&sig={}", call.url, blob.signature);
            let output = Effect::Output(json!({"accessSAS": url}));
            return Ok(self.accepted(202, call, Operation::new(path, output), &Value::Null));
        }
        // A signature is not valid after the end of the access.
        blob.signature += 1;
        let mut error = Value::Null;
        if state == "ActiveUpload" {
            let footer = blob.made.as_ref().map_or(0, |made| made.0.saturating_sub(512));
            if blob.pages.get(&footer).is_some_and(|page| page.starts_with(COOKIE)) {
                disk["properties"]["diskState"] = "Unattached".into();
            } else {
                error = json!({"code": "InvalidVhd", "message": "The VHD has no valid footer."});
            }
        }
        drop(blob);
        let end = Operation::new(path, Effect::Output(json!({}))).failing(error);
        Ok(self.accepted(202, call, end, &Value::Null))
    }
}
