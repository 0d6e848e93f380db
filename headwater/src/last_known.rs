//! Remembers the last answers of a remote store, so that versions can be opened while it is unreachable. Versions
//! that were copied completely to this host then work without it. Kept in memory and, with a chunk cache on disk,
//! there too, for the next process.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use headwater_remote::ServerUrl;
use headwater_store::{Access, Image, ImageName, S3Url, Store, StoreError, StoreErrorKind};
use parking_lot::Mutex;

use crate::adapters::disk_host::KnownStore;
use crate::show;
use crate::stores::{self, Credentials};

/// The most images that are remembered.
const IMAGES_MAX: usize = 256;

/// The last known state of one store.
pub struct LastKnown {
    /// The store's name as the user gave it.
    name: String,
    /// The canonical form of the name.
    key: String,
    disk: Option<Arc<dyn KnownStore>>,
    images: Mutex<HashMap<ImageName, Known>>,
}

struct Known {
    image: Image,
    at: SystemTime,
    /// Whether the warning about outdated data was logged since the image was last looked up.
    is_said: bool,
}

impl LastKnown {
    /// The last known state of the store with this name; `disk` stores it for the next process.
    pub fn new(store: &str, disk: Option<Arc<dyn KnownStore>>) -> Self {
        Self { name: store.to_owned(), key: one_spelling(store), disk, images: Mutex::default() }
    }

    /// Opens the store. If it cannot be reached, it is opened with its last known state, and reads of its objects
    /// wait.
    pub fn open(&self, access: Access, credentials: &Credentials) -> Result<Arc<dyn Store>, StoreError> {
        match stores::open(&self.name, access, credentials) {
            Ok(store) => {
                if let Some(disk) = self.disk.as_ref().filter(|_| store.is_remote()) {
                    disk.keep_store(&self.key, store.chunk_bytes());
                }
                Ok(store)
            }
            Err(e) if e.kind() == StoreErrorKind::Unreachable => {
                let known = self.disk.as_ref().and_then(|disk| disk.kept_store(&self.key));
                let Some((chunk_bytes, at)) = known else { return Err(e) };
                tracing::warn!(store = self.key, since = time(at), error = %e,
                    "the store cannot be reached: using its last known state");
                stores::open_unseen(&self.name, access, credentials, chunk_bytes)
            }
            Err(e) => Err(e),
        }
    }

    /// Looks an image up.
    pub fn look_up(&self, store: &dyn Store, name: &ImageName) -> Result<Option<Image>, StoreError> {
        let found = store.image(name);
        if !store.is_remote() {
            return found;
        }
        match found {
            Ok(Some(image)) => {
                if let Some(disk) = &self.disk {
                    disk.keep_image(&self.key, &image);
                }
                self.know(Known { image: image.clone(), at: SystemTime::now(), is_said: false });
                Ok(Some(image))
            }
            Ok(None) => {
                self.images.lock().remove(name);
                if let Some(disk) = &self.disk {
                    disk.forget_image(&self.key, name);
                }
                Ok(None)
            }
            Err(e) if e.kind() == StoreErrorKind::Unreachable => match self.known(name, &e) {
                Some(image) => Ok(Some(image)),
                None => Err(e),
            },
            Err(e) => Err(e),
        }
    }

    fn know(&self, known: Known) {
        let mut images = self.images.lock();
        if images.contains_key(&known.image.name) || images.len() < IMAGES_MAX {
            images.insert(known.image.name.clone(), known);
        }
    }

    /// The last known state of the image; logs a warning the first time.
    fn known(&self, name: &ImageName, why: &StoreError) -> Option<Image> {
        let say = |at| {
            tracing::warn!(image = %name, since = time(at), error = %why,
                "the image cannot be looked up: using its last known versions");
        };
        if let Some(known) = self.images.lock().get_mut(name) {
            if !std::mem::replace(&mut known.is_said, true) {
                say(known.at);
            }
            return Some(known.image.clone());
        }
        let (image, at) = self.disk.as_ref()?.kept_image(&self.key, name)?;
        say(at);
        self.know(Known { image: image.clone(), at, is_said: true });
        Some(image)
    }
}

/// A canonical key for a store name: the order of servers and the timeout are ignored.
fn one_spelling(name: &str) -> String {
    if let Ok(url) = name.parse::<S3Url>() {
        return url.to_string();
    }
    if stores::is_server(name)
        && let Ok(servers) = ServerUrl::parse_list(name)
    {
        let mut servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
        servers.sort_unstable();
        return servers.join(",");
    }
    name.to_owned()
}

fn time(at: SystemTime) -> String {
    let since_1970 = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    show::time(u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_has_one_name_however_it_is_written() {
        for (a, b) in [
            ("https://b.example/,https://a.example:443", "https://a.example, https://b.example"),
            ("s3://images/a/?endpoint=http://h:1&timeout=5", "s3://images/a?endpoint=http://h:1"),
            ("/srv/images", "/srv/images"),
        ] {
            assert_eq!(one_spelling(a), one_spelling(b));
        }
        assert_ne!(one_spelling("https://a.example"), one_spelling("http://a.example"));
        assert_ne!(one_spelling("s3://images/a"), one_spelling("s3://images/b"));
    }
}
