//! The trait [`Store`] that every store implements (a directory, S3, and servers in another crate), and the
//! types of its calls. A store keeps bytes and lists of versions; it cannot read manifests.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::Holes;
use crate::name::{ImageName, ImageReference};
use crate::needs::Needs;
use crate::refs::{Image, Version};
use crate::retention::RetentionRoot;
use crate::waiting::Waiting;

/// The largest manifest: enough for 20 million distinct chunks, or 1.2 TiB of data at 64 KiB.
pub const MANIFEST_MAX_BYTES: u64 = 1 << 30;

/// The largest boot trace: enough for four million chunks, or 256 GiB at 64 KiB.
pub const TRACE_MAX_BYTES: u64 = 64 << 20;

/// A store of image versions. Every call may block on I/O.
///
/// # Contract
/// - [`Store::manifest`] returns bytes that were checked against their hash. [`Object::read_range`] does not
///   check: the reader checks chunks, once, when they enter memory.
/// - A handle stays readable if its version is removed. But a version in use should be pinned, so that the
///   removal fails and says why.
pub trait Store: Send + Sync + 'static {
    /// The chunk size of all images in this store, in bytes; fixed when the store was created.
    fn chunk_bytes(&self) -> u32;

    /// Whether a read crosses a network. If so, readers fetch data in advance and cache it.
    fn is_remote(&self) -> bool {
        false
    }

    /// Whether this handle cannot change the store.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Network traffic so far, and whether reads wait; `None` for a store on this host.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Ends reads that wait for a network, with an error, and refuses new ones.
    fn close(&self) {}

    /// The same store for volumes: reads of its objects wait while the store cannot be reached, instead of
    /// failing. `None`: reads wait already, or never need to.
    fn retrying(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// The same store for callers that prefer a quick error to waiting: reads of its objects fail while the
    /// store cannot be reached. `None`: reads fail already.
    fn fail_fast(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// The same store for callers whose own clients wait, and have timeouts of their own. As
    /// [`Store::fail_fast`], and requests do not wait for a busy server either. `None`: no request of this
    /// store waits.
    fn with_short_timeout(&self) -> Option<Arc<dyn Store>> {
        self.fail_fast()
    }

    /// All images, by name. It fails if one list of versions cannot be read, because it is for callers that
    /// must know every version.
    fn images(&self) -> Result<Vec<Image>, StoreError>;

    /// All images, by name. Images whose list of versions is damaged or of a later format are returned
    /// separately, so that they do not block the others.
    fn listed(&self) -> Result<Listed, StoreError> {
        Ok(Listed { images: self.images()?, unreadable: Vec::new() })
    }

    /// Fails if the store no longer exists where it was opened.
    fn is_there(&self) -> Result<(), StoreError> {
        self.listed().map(drop)
    }

    /// One image; `None` if there is none of that name.
    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError>;

    /// The bytes of a manifest, checked against `id`.
    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError>;

    /// As [`Store::manifest`], to be read and checked in parts. `None`: the store cannot do that, or it would
    /// not be faster.
    fn manifest_parts(&self, id: Hash) -> Result<Option<Arc<dyn Parts>>, StoreError> {
        let _ = id;
        Ok(None)
    }

    /// A data object, ready for reading.
    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError>;

    /// As [`Store::open_object`], for a caller that found wrong bytes or a wrong length. A store with several
    /// copies prefers copies that were not used before, and bypasses caches.
    fn open_object_uncached(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        self.open_object(id)
    }

    /// Opens a data object that must have this length, which comes from a manifest. A store that needs a
    /// request for the length may leave that to the first read.
    fn open_object_of(&self, id: Hash, len_bytes: u64) -> Result<Arc<dyn Object>, StoreError> {
        let opened = self.open_object(id)?;
        if opened.len_bytes() == len_bytes {
            return Ok(opened);
        }
        Err(StoreError::new(
            StoreErrorKind::Damaged,
            format!("the data object {id} has {} bytes instead of {len_bytes}", opened.len_bytes()),
        ))
    }

    /// The boot trace of the version with this manifest, at most [`TRACE_MAX_BYTES`]; `None` if none was
    /// recorded, or if the store has no traces. It is a hint, and not checked here.
    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        let _ = manifest;
        Ok(None)
    }

    /// Stores `trace` with the version, or removes it if `None`. A reader without write access to versions
    /// may do this too. The last write wins, and a lost trace only costs a slower boot.
    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        let _ = (manifest, trace);
        Err(StoreError::new(StoreErrorKind::ReadOnly, "this store keeps no boot traces"))
    }

    /// Keeps the version with this manifest from being removed by any process, until the pin is dropped.
    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError>;

    /// Whether independent daemons remove versions from it, so that [`Store::retain`] must record what others
    /// need.
    fn keeps_roots(&self) -> bool {
        false
    }

    /// Records that somebody needs a version, even while no process has the store open. It is not removed
    /// until [`Store::release`]. Repeating the call is no error. If the version is not in its image, the
    /// error is [`StoreErrorKind::NotFound`]. If another daemon has a maintenance session of the image, it is
    /// [`StoreErrorKind::InUse`]. After these two errors nothing is recorded; after any other error the
    /// record may exist.
    ///
    /// A store with a single writer records nothing: only that writer removes versions, and it knows its own
    /// needs.
    fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        let _ = root;
        Ok(())
    }

    /// Removes a retention root. A root that does not exist is no error.
    fn release(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        let _ = root;
        Ok(())
    }

    /// The retention roots of a daemon, without their holders.
    fn roots_of(&self, daemon: &str) -> Result<Vec<RetentionRoot>, StoreError> {
        let _ = daemon;
        Ok(Vec::new())
    }

    /// As [`Store::pin`], while the store cannot be reached: it sends no request now, and the reader finds
    /// out whether the version still exists. The pin takes effect when the store is back.
    fn pin_later(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.pin(manifest)
    }

    /// Starts a new version. During a publication no object is reclaimed.
    fn publish(&self) -> Result<Box<dyn Publication>, StoreError>;

    /// Changes the channels, the flags or the notes of an image. `change` gets the stored image. Unless it
    /// fails, the changed image is stored durably. No other process changes the image in between. `change`
    /// must leave the versions as they are, except through [`Image::retire`] and [`Image::set_note`].
    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Its directory on this host; `None` if it is elsewhere.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// The store's name for people: a path or a URL, without secrets.
    fn shown(&self) -> String {
        "the store".to_owned()
    }

    /// The size of all files of the store, in bytes.
    fn stored_bytes(&self) -> Result<u64, StoreError> {
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("the size of {} is unknown", self.shown())))
    }

    /// Replaces damaged bytes of a data object by right ones. If the store writes the object as a whole, the
    /// result must have the hash in its name. If it writes in place, the caller has checked the bytes, and
    /// after a crash the object is at most as damaged as before.
    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        let _ = (object, patches);
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("{} cannot be written", self.shown())))
    }

    /// Writes the right bytes of a lost or damaged manifest, durably; `bytes` must have the hash `id`. Pins
    /// on it stay valid.
    fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        let _ = (id, bytes);
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("{} cannot be written", self.shown())))
    }

    /// Removes one version, or with `None` the whole image with its channels, and frees the objects that no
    /// other version needs. A single version is not removed if a channel points to it, or will by a scheduled
    /// promotion. The image stays after its last version is removed, so that its numbers continue.
    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError>;

    /// Removes a whole image. If a channel points to one of its versions, or will, the error is
    /// [`StoreErrorKind::InUse`]. A store with several writers checks the channels in the same step as the
    /// removal. Otherwise a promotion between the two steps would succeed, and its version would be removed.
    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        if let Some(image) = self.image(name)? {
            image.check_removal(None)?;
        }
        self.remove(name, None)
    }

    /// Frees what earlier removals left because it was in use, if it no longer is. Returns the bytes freed.
    /// It is cheap if nothing was left. The end of a pin notifies nobody, so call this from time to time.
    fn reclaim_left(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    /// Frees the parts of data objects that no version needs, if the store supports holes. It examines
    /// objects of removed versions, while no publication is in progress. Returns the bytes freed. It is cheap
    /// if nothing was removed. A store without holes keeps such objects until no version needs any part of
    /// them.
    fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        let _ = needs;
        Ok(0)
    }

    /// Finds the version that a reference selects. An error lists the existing versions.
    fn resolve(&self, reference: &ImageReference) -> Result<Version, StoreError> {
        match self.image(&reference.name)? {
            Some(image) => image.select(&reference.selector).cloned(),
            None => Err(crate::refs::no_such_image(&reference.name)),
        }
    }
}

/// The images of a store.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// The images that can be read.
    pub images: Vec<Image>,
    /// The other images, and why they cannot be read.
    pub unreadable: Vec<(ImageName, StoreError)>,
}

impl Listed {
    /// Reads each of these images. If the store itself fails, the call fails.
    pub fn read(
        names: &[ImageName],
        mut image: impl FnMut(&ImageName) -> Result<Option<Image>, StoreError>,
    ) -> Result<Self, StoreError> {
        let mut listed = Self::default();
        for name in names {
            match image(name) {
                // `None`: the image was removed since it was listed, which is no error.
                Ok(found) => listed.images.extend(found),
                Err(e) if matches!(e.kind(), StoreErrorKind::Damaged | StoreErrorKind::UnknownFormat) => {
                    listed.unreadable.push((name.clone(), e));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(listed)
    }
}

/// A manifest that is open for reading in parts. It stays readable if its version is removed.
pub trait Parts: Send + Sync + 'static {
    /// The length of the whole manifest.
    fn len_bytes(&self) -> u64;

    /// The bytes of a range, checked. A range that goes past the end is an error.
    fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError>;
}

/// An immutable data object that is open for reading.
pub trait Object: Send + Sync {
    /// Its hash, which is its name.
    fn id(&self) -> Hash;

    /// Its length.
    fn len_bytes(&self) -> u64;

    /// Fills `into` from `offset`. If the object ends earlier, it is an error.
    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError>;

    /// As [`Object::read_range`], for a caller that got wrong bytes for this range. A store with several
    /// copies prefers those that did not give the bytes before, and bypasses caches. It blames no copy,
    /// because it cannot know which one is wrong.
    ///
    /// `reading` is the attempt number of a full re-read of the object. All bytes of one re-read should come
    /// from one copy, and each re-read from another copy.
    fn read_range_past_caches(
        &self,
        offset: u64,
        into: &mut [u8],
        reading: Option<u32>,
    ) -> Result<(), StoreError> {
        let _ = reading;
        self.read_range(offset, into)
    }

    /// As [`Object::read_range`], for a caller that can check the bytes. If `check` refuses them, a store
    /// with several copies reads another one. If no copy has better bytes, the error is that of `check`.
    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        self.read_range(offset, into)?;
        check(into)
    }

    /// As [`Object::read_checked`], for a caller that has other work while the store is away. `false`: the
    /// read waits and `into` has no result. The caller repeats the same call with this `waiting` when it is
    /// due.
    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        let _ = waiting;
        self.read_checked(offset, into, check).map(|()| true)
    }

    /// The holes of the object: parts that no version of the store needs any more. They are read on request.
    /// A read of them from a bucket waits like a read of bytes. Servers that cannot be reached now are waited
    /// for only if the object was found wrong. Otherwise they count as having no holes, and the hash of the
    /// object shows whether that is true.
    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        Ok(Arc::default())
    }

    /// As [`Object::holes`], for a caller that needs bytes in these holes. A store on several servers asks
    /// all of them again, bypasses caches, and waits for servers that do not answer, as it would for better
    /// bytes. From then on the object is read with the returned holes.
    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.holes()
    }

    /// As [`Object::holes`], for re-read number `reading` of the whole object with
    /// [`Object::read_range_past_caches`]. Returns the holes of the copy that this re-read uses, so that no
    /// part of it has to come from another copy.
    fn holes_of_reading(&self, reading: u32) -> Result<Arc<Holes>, StoreError> {
        let _ = reading;
        self.holes()
    }

    /// Reports that the whole object, as [`Object::read_range`] gave it, does not have the hash in its name.
    /// A store with several copies reads others from now on. Returns whether another read may help.
    fn was_wrong(&self) -> bool {
        false
    }
}

/// Checks whether bytes are the requested ones; see [`Object::read_checked`].
pub type Check<'a> = dyn FnMut(&[u8]) -> Result<(), StoreError> + 'a;

/// A version being written. Dropping it undoes everything.
pub trait Publication: Send {
    /// Appends to the version's data object. The object exists only if something was appended.
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError>;

    /// Finishes the data object, durably. Returns its name and length, or `None` if nothing was appended.
    fn finish_object(&mut self) -> Result<Option<(Hash, u64)>, StoreError> {
        self.finish_object_telling(&mut |_| Ok(()))
    }

    /// As [`Publication::finish_object`]. If the object is sent to the store only now, `sent` gets the number
    /// of additional bytes that the store has. It is called with zero before the first byte is sent, and its
    /// error ends the sending. After an error only drop this publication; nothing of the object then remains.
    fn finish_object_telling(
        &mut self,
        sent: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<Option<(Hash, u64)>, StoreError>;

    /// Copies a data object of another store, durably, unless it exists; checks its hash. Ranges that both
    /// stores lack stay holes. `copied` gets the number of additional bytes, including those of an
    /// interrupted copy, and its error ends the copy. After an error the copied part stays for the next copy
    /// to continue. The object stays if this publication is dropped.
    fn copy_object(
        &mut self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Checks that nothing was reclaimed since the publication began. It fails if other processes considered
    /// this one dead in between. A store with a single writer has nothing to check.
    fn confirm(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Adds a version of another store under its own number, durably. All its objects must exist. Returns
    /// what that did, or `None` if the version existed already. A version with the same number and another
    /// manifest is an error.
    fn adopt(
        self: Box<Self>,
        name: &ImageName,
        version: &Version,
        manifest: &[u8],
    ) -> Result<Option<Adopted>, StoreError>;

    /// Adds the version to the image, durably. With [`NewVersion::unless_newest`] it may return the existing
    /// version. After an error nothing of it remains, unless a server's answer was lost; the error then says
    /// that the outcome is unknown.
    fn commit(self: Box<Self>, version: NewVersion<'_>) -> Result<Committed, StoreError>;
}

/// What [`Publication::adopt`] did to an image, without changes that others made before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Whether the version is the newest of its image that is not retired.
    pub is_newest: bool,
    /// The version that a machine booted before this version was added, if it named only the image.
    pub booted: Option<u32>,
    /// The version that such a machine boots now.
    pub boots: Option<u32>,
}

/// What [`Publication::commit`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The image's newest version.
    pub version: Version,
    /// Whether this commit added it. Of concurrent commits of the same bytes, exactly one did.
    pub is_new: bool,
    /// The version to which the commit set `production`; see [`NewVersion::is_sealed`].
    pub production: Option<u32>,
}

/// The parameters of [`Publication::commit`].
#[derive(Clone, Copy, Debug)]
pub struct NewVersion<'a> {
    /// The image, which is created if it does not exist.
    pub name: &'a ImageName,
    /// The manifest's bytes.
    pub manifest: &'a [u8],
    /// Every object that the manifest refers to, including those of earlier versions.
    pub objects: &'a [Hash],
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// The time in seconds since 1970, by the caller's clock.
    pub created_at_s: u64,
    /// Where it came from, at most [`crate::NOTE_MAX_BYTES`].
    pub source: &'a str,
    /// A line for people, at most [`crate::NOTE_MAX_BYTES`].
    pub note: &'a str,
    /// Who made it, at most [`crate::AUTHOR_MAX_BYTES`].
    pub author: &'a str,
    /// Whether to add nothing if the newest version that is not retired already has this manifest.
    pub unless_newest: bool,
    /// The highest version number that the image may have at the commit, not counting retired versions. If it
    /// has a higher one, the commit is refused.
    pub newest_at_most: Option<u32>,
    /// Whether it was made from a machine's disk. No machine boots it before it is promoted: if `production`
    /// is not set, the commit sets it to the newest version before this one.
    pub is_sealed: bool,
    /// Whether it may contain the identity of one machine: its SSH host key, machine-id or host name. Stored
    /// with the version.
    pub keeps_identity: bool,
}

/// Right bytes for a range of a data object.
#[derive(Clone, PartialEq, Eq)]
pub struct Patch {
    /// Their offset in the object.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for Patch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Patch({}+{})", self.offset, self.bytes.len())
    }
}

/// Applies the patches to `bytes`, which start at `offset` in the object.
pub(crate) fn patched(patches: &[Patch], offset: u64, bytes: &mut [u8]) {
    for patch in patches {
        for (at, byte) in (patch.offset..).zip(&patch.bytes) {
            let place = at.checked_sub(offset).and_then(|at| usize::try_from(at).ok());
            if let Some(target) = place.and_then(|place| bytes.get_mut(place)) {
                *target = *byte;
            }
        }
    }
}

/// Refuses a manifest that is too large for readers.
pub(crate) fn check_manifest_size(name: &ImageName, manifest: &[u8]) -> Result<(), StoreError> {
    if u64::try_from(manifest.len()).is_ok_and(|len| len <= MANIFEST_MAX_BYTES) {
        return Ok(());
    }
    let len = manifest.len();
    Err(StoreError::new(
        StoreErrorKind::Invalid,
        format!(
            "the manifest of '{name}' would have {len} bytes, and at most {MANIFEST_MAX_BYTES} are allowed"
        ),
    ))
}

/// Counters and state of a remote store since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The servers of the store.
    pub servers: u64,
    /// How many of them can be used now.
    pub servers_up: u64,
    /// Requests sent.
    pub requests: u64,
    /// Bytes that were received and used.
    pub fetched_bytes: u64,
    /// Reads that continued at another server after one had failed.
    pub failovers: u64,
    /// Reads that were sent to a second server because the first was late.
    pub hedges: u64,
    /// Answers whose bytes were wrong.
    pub wrong_answers: u64,
    /// Reads that had to wait because no server could be reached.
    pub waits: u64,
    /// The total time that they waited, in milliseconds.
    pub waited_ms: u64,
    /// How long the longest of them waited, in milliseconds.
    pub longest_wait_ms: u64,
    /// The longest read in milliseconds, including waits and other servers.
    pub longest_read_ms: u64,
    /// Reads that wait now.
    pub waiting: u64,
    /// For each server that cannot be used, the reason, for people.
    pub reasons: String,
    /// The longest time for which one of them could not be used, in milliseconds. A server that is only busy
    /// does not count.
    pub longest_away_ms: u64,
}

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Numbers of the versions that are gone.
    pub versions: Vec<u32>,
    /// Bytes freed. It is zero during a publication: the space is freed when that ends. Objects also stay
    /// while a removed version is still pinned. They are freed by the next write or removal after that, or by
    /// [`Store::reclaim_left`].
    pub freed_bytes: u64,
}

/// Prevents the removal of a version until it is dropped.
pub struct Pin(#[expect(dead_code, reason = "held only to be dropped")] Box<dyn Send + Sync>);

impl Pin {
    /// Wraps what keeps the version, such as an open locked file or a lease.
    pub fn new(holder: impl Send + Sync + 'static) -> Self {
        Self(Box::new(holder))
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pin")
    }
}
