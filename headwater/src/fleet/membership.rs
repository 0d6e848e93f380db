//! The files of a node in `DIR/node`: its controller, its certificate and its key.

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};

use crate::data_dir::DataDir;
use crate::replace::replace;

/// The file that is written last: if it exists, the host has joined.
const FLEET: &str = "fleet.json";

/// The fleet of a host that has joined, and the credentials for it.
#[derive(Clone)]
pub struct Joined {
    /// The fleet.
    pub fleet: Fleet,
    /// Its certificate, in PEM.
    pub certificate: String,
    /// Its key, in PEM.
    pub key: String,
    /// The authority of the fleet, in PEM.
    pub authority: String,
}

/// The fleet of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fleet {
    /// The URLs of its controllers, only one of which serves at a time.
    pub controllers: Vec<String>,
    /// The name of the host in the fleet.
    pub name: String,
}

impl Fleet {
    /// Its controllers, for messages.
    pub fn controllers(&self) -> String {
        self.controllers.join(" and ")
    }
}

/// The directory of the files.
pub fn dir_of(data_dir: &DataDir) -> PathBuf {
    data_dir.path().join("node")
}

/// Reads the files. `None`: the host has joined no fleet.
pub fn load(data_dir: &DataDir) -> anyhow::Result<Option<Joined>> {
    let dir = dir_of(data_dir);
    let path = dir.join(FLEET);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    let fleet = serde_json::from_str(&text).map_err(|error| {
        let message = format!("cannot understand {}: {error}", path.display());
        Problem::new(ProblemKind::Damaged, message)
            .advise("restore it, or remove its directory and join again with 'headwater node join'")
    })?;
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let (certificate, key, authority) = (read("cert.pem")?, read("key.pem")?, read("ca.pem")?);
    Ok(Some(Joined { fleet, certificate, key, authority }))
}

/// Writes the files of a host that has joined. The caller holds the lock of the data directory.
pub fn save(data_dir: &DataDir, joined: &Joined) -> anyhow::Result<()> {
    let dir = dir_of(data_dir);
    let failed = || format!("cannot write to {}", dir.display());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).with_context(failed)?;
    let write =
        |name: &str, text: &str| replace(&dir.join(name), text.as_bytes(), 0o600).with_context(failed);
    write("key.pem", &joined.key)?;
    write("cert.pem", &joined.certificate)?;
    write("ca.pem", &joined.authority)?;
    write(FLEET, &serde_json::to_string_pretty(&joined.fleet)?)
}
