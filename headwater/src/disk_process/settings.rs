//! The settings that the daemon sends to the disk process with the first call: where images, overflow files and keys are, and how they
//! are read and written. They also decide what the sandbox permits ([`Needs`]). Limits of single machines are not here: they come with
//! each disk.

use std::path::PathBuf;

use headwater_volume::Buffering;
use serde::{Deserialize, Serialize};

use super::sandbox::Needs;
use crate::caches::{CacheArgs, WritingArgs};
use crate::data_dir::DataDir;
use crate::stores::Credentials;
use crate::streaming::{Ahead, BootTrace, CopyRate, DiskCachePlace, StreamArgs};

/// The places of images and overflow, and the options for reading and writing them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    store: Option<String>,
    own_store: PathBuf,
    cache_dir: PathBuf,
    keys_dir: PathBuf,
    recordings_dir: PathBuf,
    token: Option<PathBuf>,
    ca: Option<PathBuf>,
    pause_s: u64,
    buffering: Buffering,
    cache_ram_bytes: Option<u64>,
    chunk_memory_bytes: Option<u64>,
    chunk_cache: Option<(PathBuf, u64)>,
    hydrate: Option<HydrateRate>,
    has_boot_trace: bool,
    has_readahead: bool,
}

/// The limit for the rate at which images are copied to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HydrateRate {
    Max,
    /// Bytes per second.
    Bytes(u64),
}

impl Settings {
    /// The settings of a daemon.
    pub fn new(
        data_dir: &DataDir,
        store: Option<&str>,
        credentials: &Credentials,
        caches: &CacheArgs,
        stream: &StreamArgs,
    ) -> std::io::Result<Self> {
        let absolute = |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
        let chunk_cache = match &stream.chunk_cache {
            Some(place) => Some((std::path::absolute(&place.dir)?, place.size_bytes)),
            None => None,
        };
        let store = match store {
            Some(name) => match crate::stores::directory(name) {
                Some(directory) => Some(std::path::absolute(directory)?.to_string_lossy().into_owned()),
                None => Some(name.to_owned()),
            },
            None => None,
        };
        Ok(Self {
            store,
            own_store: data_dir.store(),
            cache_dir: data_dir.cache(),
            keys_dir: data_dir.keys(),
            recordings_dir: data_dir.recordings(),
            token: absolute(&credentials.token)?,
            ca: absolute(&credentials.ca)?,
            pause_s: caches.writing.pause,
            buffering: caches.writing.buffering,
            cache_ram_bytes: caches.cache_ram,
            chunk_memory_bytes: stream.chunk_memory,
            chunk_cache,
            hydrate: stream.hydrate.map(|CopyRate(rate)| rate.map_or(HydrateRate::Max, HydrateRate::Bytes)),
            has_boot_trace: stream.boot_trace == BootTrace::Auto,
            has_readahead: stream.readahead == Ahead::Auto,
        })
    }

    /// Whether both use the same store, even if they read it with other options.
    pub fn is_same_store(&self, other: &Self) -> bool {
        (&self.store, &self.own_store) == (&other.store, &other.own_store)
    }

    /// The name of the store. `None`: that of the data directory.
    pub fn store(&self) -> Option<&str> {
        self.store.as_deref()
    }

    /// The files and the network that the disk process needs for these settings.
    pub fn needs(&self, data_dir: &DataDir) -> Needs {
        let store = match &self.store {
            Some(name) => crate::stores::directory(name).map(PathBuf::from),
            None => Some(self.own_store.clone()),
        };
        let chunk_cache = self.chunk_cache.iter().map(|(dir, _)| dir.clone());
        Needs {
            network: store.is_none(),
            read: store.into_iter().collect(),
            replaced: self.token.iter().chain(&self.ca).cloned().collect(),
            write: [&self.cache_dir, &self.keys_dir, &self.recordings_dir]
                .into_iter()
                .cloned()
                .chain(chunk_cache)
                // A tmpfs for the memory of write caches, if somebody mounted it.
                .chain(Some(data_dir.memory()).filter(|memory| memory.is_dir()))
                .collect(),
            listen: vec![data_dir.run()],
            guarded: data_dir.path().to_owned(),
        }
    }

    /// The store of the data directory.
    pub fn own_store(&self) -> PathBuf {
        self.own_store.clone()
    }

    /// The directory of overflow files.
    pub fn cache_dir(&self) -> PathBuf {
        self.cache_dir.clone()
    }

    /// The directory of the keys of persistent disks.
    pub fn keys_dir(&self) -> PathBuf {
        self.keys_dir.clone()
    }

    /// The directory of recordings.
    pub fn recordings_dir(&self) -> PathBuf {
        self.recordings_dir.clone()
    }

    /// The token and the certificate authorities for servers of the store.
    pub fn credentials(&self) -> Credentials {
        Credentials { token: self.token.clone(), ca: self.ca.clone() }
    }

    /// The settings that all write caches share.
    pub fn caches(&self) -> CacheArgs {
        let writing = WritingArgs { pause: self.pause_s, buffering: self.buffering };
        CacheArgs { writing, cache_ram: self.cache_ram_bytes }
    }

    /// How images are read.
    pub fn stream(&self) -> StreamArgs {
        let place = |(dir, size_bytes)| DiskCachePlace { dir, size_bytes };
        StreamArgs {
            chunk_memory: self.chunk_memory_bytes,
            chunk_cache: self.chunk_cache.clone().map(place),
            hydrate: self.hydrate.map(|rate| match rate {
                HydrateRate::Max => CopyRate(None),
                HydrateRate::Bytes(bytes) => CopyRate(Some(bytes)),
            }),
            boot_trace: if self.has_boot_trace { BootTrace::Auto } else { BootTrace::Off },
            readahead: if self.has_readahead { Ahead::Auto } else { Ahead::Off },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_arrive_as_they_were_given() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::locate(Some(dir.path().to_owned())).unwrap();
        let credentials = Credentials { token: Some("/t".into()), ca: None };
        let writing = WritingArgs { pause: 7, buffering: Buffering::Auto };
        let caches = CacheArgs { writing, cache_ram: Some(1 << 30) };
        for hydrate in [None, Some(CopyRate(None)), Some(CopyRate(Some(5)))] {
            let stream = StreamArgs {
                chunk_memory: Some(9),
                chunk_cache: Some(DiskCachePlace { dir: "/c".into(), size_bytes: 3 }),
                hydrate,
                boot_trace: BootTrace::Off,
                readahead: Ahead::Auto,
            };
            let name = Some("https://images");
            let settings = Settings::new(&data_dir, name, &credentials, &caches, &stream).unwrap();
            let sent = serde_json::to_string(&settings).unwrap();
            let arrived: Settings = serde_json::from_str(&sent).unwrap();
            assert_eq!(arrived, settings);
            assert_eq!(format!("{:?}", arrived.stream()), format!("{stream:?}"));
            assert_eq!(format!("{:?}", arrived.caches()), format!("{caches:?}"));
            assert_eq!((arrived.credentials(), arrived.store()), (credentials.clone(), name));
        }
    }
}
