//! Contexts: the servers that this user has logged in to, and the current one.
//!
//! They are stored with their tokens in one file of the user's configuration, which only its owner may read.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::Context as _;
use headwater_api::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};

use crate::client::server::{Address, ClientFiles, Trust};
use crate::replace::replace;

/// The name of the context that means the daemon of this host.
pub const LOCAL: &str = "local";

/// A server that the user has logged in to.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// Its URL.
    pub url: String,
    /// The fingerprint of its certificate, if the server is recognised by that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// The authorities for its certificate, in PEM, if they are not the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authorities: Option<String>,
    /// The user's token. Empty: the user has a client certificate instead.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub token: String,
    /// The user's client certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<ClientFiles>,
}

impl Context {
    /// Its address.
    pub fn address(&self) -> anyhow::Result<Address> {
        Address::parse(&self.url)
    }

    /// How the server is recognised.
    pub fn trust(&self) -> Trust {
        match &self.fingerprint {
            Some(fingerprint) => Trust::Fingerprint(fingerprint.clone()),
            None => Trust::Authorities(self.authorities.clone()),
        }
    }
}

impl std::fmt::Debug for Context {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("url", &self.url).finish_non_exhaustive()
    }
}

/// All contexts of a user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    /// The name of the current context. Absent: the daemon of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The contexts by name.
    #[serde(default)]
    pub contexts: BTreeMap<String, Context>,
}

impl Contexts {
    /// Reads the file. If it does not exist, there are no contexts.
    pub fn load() -> anyhow::Result<Self> {
        let Some(path) = path() else { return Ok(Self::default()) };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        serde_json::from_str(&text).map_err(|e| {
            let message = format!("cannot understand {}: {e}", path.display());
            Problem::new(ProblemKind::Damaged, message)
                .advise("correct or remove it, and log in again")
                .into()
        })
    }

    /// Writes the file.
    pub fn save(&self) -> anyhow::Result<()> {
        let Some(path) = path() else {
            let problem = Problem::new(ProblemKind::Failed, "there is no directory for the login");
            return Err(problem.advise("set HOME or XDG_CONFIG_HOME").into());
        };
        let failed = || format!("cannot write {}", path.display());
        if let Some(dir) = path.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).with_context(failed)?;
        }
        replace(&path, &serde_json::to_vec_pretty(self)?, 0o600).with_context(failed)
    }

    /// The context of this name, or the current one. `None`: the daemon of this host.
    pub fn choose(&self, name: Option<&str>) -> anyhow::Result<Option<&Context>> {
        let name = name.filter(|name| !name.is_empty()).or(self.current.as_deref());
        let Some(name) = name.filter(|name| *name != LOCAL) else {
            return Ok(None);
        };
        self.contexts.get(name).map(Some).ok_or_else(|| self.unknown(name))
    }

    /// The error for an unknown name.
    pub fn unknown(&self, name: &str) -> anyhow::Error {
        let names: Vec<&str> = self.contexts.keys().map(String::as_str).chain([LOCAL]).collect();
        let message = format!("there is no context '{name}'");
        let advice = format!("there are {}; 'headwater login URL --name {name}' makes it", names.join(", "));
        Problem::new(ProblemKind::NotFound, message).advise(advice).into()
    }
}

/// The path of the file, if the user has a home directory.
fn path() -> Option<PathBuf> {
    // As the XDG specification demands, relative paths are ignored.
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")))?;
    Some(config.join("headwater/contexts.json"))
}
