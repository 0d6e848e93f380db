//! Stores by name: a directory, `s3://BUCKET/PREFIX`, or servers at `https://HOST[,https://HOST..]`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_remote::{Options, RemoteStore, ServerUrl};
use headwater_store::{Access, LocalDir, S3Options, S3Store, S3Url, Store, StoreError, StoreErrorKind};

/// What servers need to be shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct Credentials {
    /// File with the token that is shown to servers (https://..)
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub token: Option<PathBuf>,
    /// Trust the certificate authorities of this PEM file for servers, in place of the system's
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
}

/// Opens a store by its name.
pub fn open(name: &str, access: Access, credentials: &Credentials) -> Result<Arc<dyn Store>, StoreError> {
    if S3Url::is_meant(name) {
        let url: S3Url = name.parse()?;
        return Ok(Arc::new(S3Store::open(&url, access, &S3Options::new(owner()))?));
    }
    if is_server(name) {
        if access != Access::Read {
            let message = format!("{name} is a server, which can only be read: name a directory or s3://..");
            return Err(StoreError::new(StoreErrorKind::Invalid, message));
        }
        return Ok(Arc::new(RemoteStore::open(servers(name, credentials)?)?));
    }
    if let Some((scheme, _)) = name.split_once("://") {
        let message = format!(
            "'{name}': there are no stores at {scheme}://; there are directories, s3:// and https://"
        );
        return Err(StoreError::new(StoreErrorKind::Invalid, message));
    }
    Ok(Arc::new(LocalDir::open(Path::new(name), access)?))
}

/// Opens a store of another host whose chunk size is known, whether or not it can be reached.
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

/// The directory that a store's name is, unless it is a URL.
pub fn directory(name: &str) -> Option<&Path> {
    (!S3Url::is_meant(name) && !name.contains("://")).then(|| Path::new(name))
}

/// Whether a store's name is that of servers, which are only read.
pub fn is_server(name: &str) -> bool {
    name.starts_with("https://") || name.starts_with("http://")
}

/// Who we are, for others who share a bucket with us: the host, the process, and a number that no other has.
fn owner() -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy().into_owned();
    format!("{host}-{}-{}", std::process::id(), uuid::Uuid::new_v4().simple())
}
