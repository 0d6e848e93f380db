//! Opens stores by name: a directory, `s3://BUCKET/PREFIX`, or servers at `https://HOST[,https://HOST..]`. A server at
//! `http://HOST` works too, but gets no token unless it has a loopback address.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_remote::{Options, RemoteStore, ServerUrl};
use headwater_store::{
    Access, LocalDir, S3Options, S3Store, S3Url, Store, StoreError, StoreErrorKind, WhileBusy,
};

/// Token and certificate authorities for servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct Credentials {
    /// File with the token for servers (https://..)
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub token: Option<PathBuf>,
    /// Trust the certificate authorities of this PEM file for servers, instead of those of the system
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
}

/// The servers that were named when the daemon was started, and their credentials. Only these servers get the token:
/// a request may name any server, whose owner would otherwise learn the token.
#[derive(Clone, Debug, Default)]
pub struct NamedServers {
    servers: Vec<ServerUrl>,
    credentials: Credentials,
}

impl NamedServers {
    /// The servers among these stores.
    pub fn new<'a>(
        stores: impl Iterator<Item = &'a String>,
        credentials: Credentials,
    ) -> Result<Self, StoreError> {
        let named = stores.filter(|store| is_server(store)).map(|store| ServerUrl::parse_list(store));
        let servers = named.collect::<Result<Vec<_>, _>>()?.concat();
        Ok(Self { servers, credentials })
    }

    /// The credentials for a store that a request names: none if one of its servers was not named at the start, and
    /// no token if the network connection would not be encrypted.
    pub fn credentials_for(&self, store: &str) -> Credentials {
        let Ok(asked) = ServerUrl::parse_list(store) else { return Credentials::default() };
        if !asked.iter().all(|url| self.is_named(url)) {
            return Credentials::default();
        }
        let Credentials { token, ca } = self.credentials.clone();
        Credentials { token: token.filter(|_| asked.iter().all(ServerUrl::may_have_a_token)), ca }
    }

    /// The advice if servers of a store that a request names refuse access.
    pub fn advice_for(&self, store: &str) -> Option<String> {
        let asked = ServerUrl::parse_list(store).ok()?;
        let unnamed = asked.iter().find(|url| !self.is_named(url))?;
        Some(format!(
            "--token and --ca of the daemon are for servers that were named when it was started: if {unnamed} needs them, start \
             it with --repair-from {unnamed}"
        ))
    }

    fn is_named(&self, url: &ServerUrl) -> bool {
        self.servers.iter().any(|named| named.is_same_server(url))
    }
}

/// Opens a store by its name. Waits up to 30 seconds for a server that reports that it is busy.
pub fn open(name: &str, access: Access, credentials: &Credentials) -> Result<Arc<dyn Store>, StoreError> {
    open_waiting(name, access, credentials, WhileBusy::default())
}

/// Like [`open`], with the timeouts of busy servers: for this call, and for later operations on the store.
pub fn open_waiting(
    name: &str,
    access: Access,
    credentials: &Credentials,
    while_busy: WhileBusy,
) -> Result<Arc<dyn Store>, StoreError> {
    if S3Url::is_meant(name) {
        let url: S3Url = name.parse()?;
        let options = S3Options { while_busy, ..S3Options::new(owner()) };
        return Ok(Arc::new(S3Store::open(&url, access, &options)?));
    }
    if is_server(name) {
        if access != Access::Read {
            let message = format!("{name} is a server, which is read-only: name a directory or s3://..");
            return Err(StoreError::new(StoreErrorKind::Invalid, message));
        }
        let options = Options { while_busy, ..servers(name, credentials)? };
        return Ok(Arc::new(RemoteStore::open(options)?));
    }
    if let Some((scheme, _)) = name.split_once("://") {
        let message =
            format!("'{name}': {scheme}:// cannot be a store; use a directory, s3://, https:// or http://");
        return Err(StoreError::new(StoreErrorKind::Invalid, message));
    }
    Ok(Arc::new(LocalDir::open(Path::new(name), access)?))
}

/// Opens a remote store whose chunk size is known, even if it cannot be reached.
pub fn open_unseen(
    name: &str,
    access: Access,
    credentials: &Credentials,
    chunk_bytes: u32,
) -> Result<Arc<dyn Store>, StoreError> {
    if S3Url::is_meant(name) {
        let (url, options) = (name.parse()?, S3Options::new(owner()));
        return Ok(Arc::new(S3Store::open_unseen(&url, access, &options, chunk_bytes)?));
    }
    Ok(Arc::new(RemoteStore::open_unseen(servers(name, credentials)?, chunk_bytes)?))
}

fn servers(name: &str, credentials: &Credentials) -> Result<Options, StoreError> {
    let mut options = Options::new(ServerUrl::parse_list(name)?);
    options.token_file.clone_from(&credentials.token);
    options.ca_file.clone_from(&credentials.ca);
    Ok(options)
}

/// The directory of a store's name, unless the name is a URL.
pub fn directory(name: &str) -> Option<&Path> {
    (!S3Url::is_meant(name) && !name.contains("://")).then(|| Path::new(name))
}

/// Whether a store's name is that of servers, which are read-only.
pub fn is_server(name: &str) -> bool {
    name.starts_with("https://") || name.starts_with("http://")
}

/// The identity of this process for others that share a bucket: the host, the process id, and a unique number.
fn owner() -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy().into_owned();
    format!("{host}-{}-{}", std::process::id(), uuid::Uuid::new_v4().simple())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_daemon_has_for_its_servers_is_for_no_others() {
        let all = Credentials { token: Some("/token".into()), ca: Some("/ca.pem".into()) };
        let stores = ["/srv/images", "https://a.example/x,https://b.example:8443", "http://c.example"];
        let stores = stores.map(str::to_owned);
        let named = NamedServers::new(stores.iter(), all.clone()).unwrap();
        for (store, is_named) in [
            ("https://a.example", true),
            ("https://b.example:8443/golden,https://A.example", true),
            ("https://a.example:8443", false),
            ("http://a.example", false),
            ("https://a.example,https://d.example", false),
            ("https://", false),
            ("s3://images/golden", false),
            ("/srv/images", false),
        ] {
            let shown = if is_named { all.clone() } else { Credentials::default() };
            assert_eq!(named.credentials_for(store), shown, "{store}");
        }
        // The token would be visible on the network.
        let shown = named.credentials_for("http://c.example");
        assert_eq!(shown, Credentials { token: None, ..all.clone() });
        let advice = named.advice_for("https://a.example,https://d.example").unwrap();
        assert!(advice.contains("start it with --repair-from https://d.example"), "{advice}");
        for store in ["https://a.example", "http://c.example", "/srv/images", "s3://images/golden"] {
            assert_eq!(named.advice_for(store), None, "{store}");
        }
        let odd = ["https://".to_owned()];
        assert_eq!(NamedServers::new(odd.iter(), all).unwrap_err().kind(), StoreErrorKind::Invalid);
    }
}
