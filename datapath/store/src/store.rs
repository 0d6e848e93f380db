//! The trait that every store implements.

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

/// A place that keeps versions of images. Every call may block on I/O.
///
/// # Contract
/// - What [`Store::manifest`] returns has been checked against its hash. What [`Object::read_range`] returns
///   has not: the reader checks chunks, once, when they enter memory.
/// - A handle stays readable while its version is removed by somebody else, but a version in use should be
///   pinned, so that the removal fails and says why.
pub trait Store: Send + Sync + 'static {
    /// Size of a chunk of every image in this store, in bytes; fixed when the store was made.
    fn chunk_bytes(&self) -> u32;

    /// Whether a read crosses a network: then readers fetch ahead of their clients and keep what they fetched.
    fn is_remote(&self) -> bool {
        false
    }

    /// Whether nothing in it can ever be changed from here.
    fn is_read_only(&self) -> bool {
        false
    }

    /// What went over the network so far, and whether reads wait; `None` for a store on this host.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Ends reads that wait for a network, with an error, and refuses new ones.
    fn close(&self) {}

    /// The same store for volumes, whose reads of objects wait while it cannot be reached, where those of this one fail.
    /// `None` where they wait already, or never need to.
    fn retrying(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// The same store for those who rather have an error soon than wait: its reads of objects fail while it cannot be reached.
    /// `None` where those of this one do so already.
    fn fail_fast(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// The same store for those whose clients wait as well, and no longer than a server that is busy may ask for: as
    /// [`Store::fail_fast`], and nothing waits for such a server, either. `None` where nothing of this one does.
    fn hasty(&self) -> Option<Arc<dyn Store>> {
        self.fail_fast()
    }

    /// All images, by name. One list of versions that cannot be read fails it: this is for those who must know every version.
    fn images(&self) -> Result<Vec<Image>, StoreError>;

    /// All images, by name, but for those whose list of versions is damaged or of a later release: these must not stand in
    /// the way of the others.
    fn listed(&self) -> Result<Listed, StoreError> {
        Ok(Listed { images: self.images()?, unreadable: Vec::new() })
    }

    /// Whether the store can still be reached where it was opened: an error where not.
    fn is_there(&self) -> Result<(), StoreError> {
        self.listed().map(drop)
    }

    /// One image; `None` if there is none of that name.
    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError>;

    /// The bytes of a manifest, checked against `id`.
    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError>;

    /// The same, to be read and checked in parts; `None` where the store cannot do that, or it would not pay.
    fn manifest_parts(&self, id: Hash) -> Result<Option<Arc<dyn Parts>>, StoreError> {
        let _ = id;
        Ok(None)
    }

    /// A data object, ready for reading.
    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError>;

    /// As [`Store::open_object`], for who found wrong what was read of it, or its length. A store that has the object in several
    /// places asks those first that gave nothing of it before, and no caches on the way.
    fn open_object_uncached(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        self.open_object(id)
    }

    /// A data object that must have this length, which a manifest says. A store that would have to ask for
    /// the length may leave that to the first read.
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
    /// recorded, or if the store keeps none. It is advice, and not checked here.
    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        let _ = manifest;
        Ok(None)
    }

    /// Keeps `trace` with the version in place of what was there, or with `None` removes it. Readers may do
    /// this too: whoever comes last wins, and a trace that is lost costs a slower boot.
    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        let _ = (manifest, trace);
        Err(StoreError::new(StoreErrorKind::ReadOnly, "this store keeps no boot traces"))
    }

    /// Keeps the version with this manifest from being removed, by any process, until the pin is dropped.
    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError>;

    /// Whether daemons of their own remove versions from it, and so are to be told by [`Store::root`] what others need.
    fn keeps_roots(&self) -> bool {
        false
    }

    /// Notes that somebody needs a version also while nobody has the store open: it is not removed until [`Store::release`].
    /// Once more is no error. A version that is not in its image is [`StoreErrorKind::NotFound`], an edit of an image that another
    /// daemon edits [`StoreErrorKind::InUse`]; then nothing is left of it, and after any other error it may be there.
    ///
    /// A store of one writer keeps none: only that one removes, and it knows its own needs.
    fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        let _ = root;
        Ok(())
    }

    /// Takes a hold away. One that is not there is no error.
    fn release(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        let _ = root;
        Ok(())
    }

    /// The holds of a daemon, without who their holders are.
    fn roots_of(&self, daemon: &str) -> Result<Vec<RetentionRoot>, StoreError> {
        let _ = daemon;
        Ok(Vec::new())
    }

    /// As [`Store::pin`], while the store cannot be reached: it is not asked now, and whether the version is still there is found
    /// out by whoever reads it. The pin counts from when the store is back.
    fn pin_later(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.pin(manifest)
    }

    /// Starts a new version. While a publication is under way no object is reclaimed.
    fn publish(&self) -> Result<Box<dyn Publication>, StoreError>;

    /// Changes the channels, the flags or the notes of an image: `change` gets what is stored, and what it leaves is
    /// stored in its place, durably, unless it fails. Nobody else changes the image meanwhile. It must leave
    /// the versions as they are but for [`Image::retire`] and [`Image::set_note`].
    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// The directory that it is, of this host; `None` where it lies elsewhere.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// What people call this store: a path or a URL, without secrets.
    fn shown(&self) -> String {
        "the store".to_owned()
    }

    /// What all files of the store take, in bytes.
    fn stored_bytes(&self) -> Result<u64, StoreError> {
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("{} does not tell its size", self.shown())))
    }

    /// Puts right bytes in place of damaged ones in a data object. What comes out must have the hash that is the
    /// object's name where the store writes it as a whole; where it writes in place, the caller has checked
    /// the bytes, and a crash leaves them as damaged as they were.
    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        let _ = (object, patches);
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("{} cannot be written", self.shown())))
    }

    /// Puts the right bytes of a manifest in place of lost or damaged ones, durably; `bytes` must have the hash `id`. Pins
    /// on it stay.
    fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        let _ = (id, bytes);
        Err(StoreError::new(StoreErrorKind::ReadOnly, format!("{} cannot be written", self.shown())))
    }

    /// Removes one version, or with `None` the whole image with its channels, and frees the objects nobody
    /// else needs. A version that a channel points to, or will, is not removed alone. The image stays when its
    /// last version is removed, so that numbers go on.
    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError>;

    /// Removes a whole image, unless a channel points, or will point, to one of its versions: that is [`StoreErrorKind::InUse`]. A
    /// store that is changed while this runs looks for channels in the step that removes: a promotion that comes between the look and
    /// the removal would be answered, and its version gone.
    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        if let Some(image) = self.image(name)? {
            image.check_removal(None)?;
        }
        self.remove(name, None)
    }

    /// Frees what an earlier removal had to leave because somebody used it, if nobody does any more. Returns the bytes freed. Cheap
    /// where nothing was left; nobody is told when a pin ends, so it is to be called now and then.
    fn reclaim_left(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    /// Gives back what no version needs of data objects that others need in part, where the store can: at a time at which nobody publishes, and
    /// of the objects of versions that were removed. Returns the bytes freed. Cheap where nothing was removed. A store without holes keeps such objects as they are,
    /// until no version needs anything of them.
    fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        let _ = needs;
        Ok(0)
    }

    /// Finds the version that a reference means. An error says which versions there are.
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
    /// Those that can be read.
    pub images: Vec<Image>,
    /// The others, and why they cannot be.
    pub unreadable: Vec<(ImageName, StoreError)>,
}

impl Listed {
    /// Reads each of these images. Where the store itself fails, all fails.
    pub fn read(
        names: &[ImageName],
        mut image: impl FnMut(&ImageName) -> Result<Option<Image>, StoreError>,
    ) -> Result<Self, StoreError> {
        let mut listed = Self::default();
        for name in names {
            match image(name) {
                // `None`: it was removed since it was listed, and that is no error.
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

/// A manifest that is open for reading in parts. It stays readable while its version is removed.
pub trait Parts: Send + Sync + 'static {
    /// The length of all of it.
    fn len_bytes(&self) -> u64;

    /// The bytes of a range, which have been checked. A range that ends behind the end is an error.
    fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError>;
}

/// An immutable data object that is open for reading.
pub trait Object: Send + Sync {
    /// Its hash, which is its name.
    fn id(&self) -> Hash;

    /// Its length.
    fn len_bytes(&self) -> u64;

    /// Fills `into` from `offset`. An object that ends before is an error.
    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError>;

    /// As [`Object::read_range`], for who found wrong what that gave of this range. A store that has the object in several places
    /// asks those first that did not give it before, and no caches on the way. It blames nobody: it cannot know who is wrong.
    /// `reading`: all of the object is read for the so manyeth time, so that all of one reading is to come from one place, and of each reading
    /// from another one.
    fn read_range_past_caches(
        &self,
        offset: u64,
        into: &mut [u8],
        reading: Option<u32>,
    ) -> Result<(), StoreError> {
        let _ = reading;
        self.read_range(offset, into)
    }

    /// As [`Object::read_range`], for a caller that can tell right bytes from wrong ones. A store that has the
    /// object in several places reads it elsewhere when `check` refuses the bytes; the error is that of
    /// `check` when no place has better ones.
    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        self.read_range(offset, into)?;
        check(into)
    }

    /// As [`Object::read_checked`], for a caller that has something else to do while the store is away. `false`: the read
    /// waits, `into` holds nothing, and the same is to be asked for again, with this `waiting`, when that is due.
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

    /// What of it is gone, as no version of the store needs it any more. It is read when it is asked for. A bucket is waited for as
    /// for its bytes. Servers that cannot be asked now are waited for only where the object was found wrong: for others nothing is gone there,
    /// and its hash tells.
    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        Ok(Arc::default())
    }

    /// As [`Object::holes`], for who needs something of what these say is gone: a store on several servers asks all of
    /// them anew, past caches, and waits for those that do not answer as it would for better bytes. From then on the object is read
    /// with what this returns.
    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.holes()
    }

    /// As [`Object::holes`], for who reads all of the object once more, for the so manyeth time, with
    /// [`Object::read_range_past_caches`]: what is gone at the place of which that reading is, so that nothing of it has to come from another one.
    fn holes_of_reading(&self, reading: u32) -> Result<Arc<Holes>, StoreError> {
        let _ = reading;
        self.holes()
    }

    /// Says that what [`Object::read_range`] gave of it, as a whole, does not have the hash that is its name. A store
    /// that has the object in several places reads it from others from now on. Returns whether there is reason to
    /// read it once more.
    fn was_wrong(&self) -> bool {
        false
    }
}

/// Says whether bytes are those that were asked for; see [`Object::read_checked`].
pub type Check<'a> = dyn FnMut(&[u8]) -> Result<(), StoreError> + 'a;

/// A version being written. Dropping it takes everything back.
pub trait Publication: Send {
    /// Appends to the version's data object. The object exists only if something was appended.
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError>;

    /// Ends the data object, durably. Returns its name and length, or `None` if nothing was appended.
    fn finish_object(&mut self) -> Result<Option<(Hash, u64)>, StoreError> {
        self.finish_object_telling(&mut |_| Ok(()))
    }

    /// The same. Where the object is sent to the store only now, `sent` is told how many bytes more are there, none before the
    /// first is sent, and can end it: an error leaves nothing of the object once this publication is dropped, which is all that can be
    /// done with it then.
    fn finish_object_telling(
        &mut self,
        sent: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<Option<(Hash, u64)>, StoreError>;

    /// Copies a data object of another store, durably, unless it is there; checks its hash. What is gone there and here stays gone. `copied` is told how many
    /// bytes more are there, those that an interrupted copy left included, and can end the copy: an error leaves
    /// what was copied so far for the next one to go on with. The object stays if this publication is dropped.
    fn copy_object(
        &mut self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Makes sure that nothing was reclaimed since it began: an error where others took this process for dead meanwhile. A
    /// store that nobody else writes to has nothing to look for.
    fn confirm(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Adds a version of another store under its own number, durably. All its objects are there. Returns what that did, `None`
    /// where the version was there; one with the same number and another manifest is an error.
    fn adopt(
        self: Box<Self>,
        name: &ImageName,
        version: &Version,
        manifest: &[u8],
    ) -> Result<Option<Adopted>, StoreError>;

    /// Adds the version to the image, durably; with [`NewVersion::unless_newest`] it may be
    /// the one that was there. After an error nothing of it remains, unless a server's answer was lost and the error says that it is
    /// not known whether it was added.
    fn commit(self: Box<Self>, version: NewVersion<'_>) -> Result<Committed, StoreError>;
}

/// What [`Publication::adopt`] did to an image, whatever others did to it before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Whether the version is the newest of its image that is not retired.
    pub is_newest: bool,
    /// The version that machines booted before it came which name the image alone.
    pub booted: Option<u32>,
    /// The one that they boot with it.
    pub boots: Option<u32>,
}

/// What [`Publication::commit`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The image's newest version.
    pub version: Version,
    /// Whether this commit added it. Of commits of the same bytes at a time, one did.
    pub is_new: bool,
    /// Where it pointed `production`; see [`NewVersion::is_sealed`].
    pub production: Option<u32>,
}

/// What [`Publication::commit`] needs to know.
#[derive(Clone, Copy, Debug)]
pub struct NewVersion<'a> {
    /// The image; made if there is none of that name.
    pub name: &'a ImageName,
    /// The manifest's bytes.
    pub manifest: &'a [u8],
    /// Every object the manifest refers to, own and older.
    pub objects: &'a [Hash],
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// When, in seconds since 1970, as the caller's clock says.
    pub created_at_s: u64,
    /// Where it came from, at most [`crate::NOTE_MAX_BYTES`].
    pub source: &'a str,
    /// A line for people, at most [`crate::NOTE_MAX_BYTES`].
    pub note: &'a str,
    /// Who made it, at most [`crate::AUTHOR_MAX_BYTES`].
    pub author: &'a str,
    /// Whether nothing is added where the newest version that is not retired has this manifest already.
    pub unless_newest: bool,
    /// The highest number that a version of the image may have by then, retired ones aside: with a newer one the commit is refused.
    pub newest_at_most: Option<u32>,
    /// Whether it was made of a machine's disk. Nobody boots it before it is promoted: where `production` is not set, the commit points
    /// it to the newest version before this one.
    pub is_sealed: bool,
    /// Whether it may hold the identity of one machine: its SSH host key, machine-id or host name. Kept with the version.
    pub keeps_identity: bool,
}

/// Right bytes for a place in a data object.
#[derive(Clone, PartialEq, Eq)]
pub struct Patch {
    /// Where they go.
    pub offset: u64,
    /// What goes there.
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for Patch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Patch({}+{})", self.offset, self.bytes.len())
    }
}

/// Puts the parts of patches that lie in `bytes`, which start at `offset`, in their places.
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

/// Refuses a manifest that no reader would read.
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

/// What a remote store did since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Places that are read from.
    pub servers: u64,
    /// Of which can be used at this moment.
    pub servers_up: u64,
    /// Requests sent.
    pub requests: u64,
    /// Bytes that were received and used.
    pub fetched_bytes: u64,
    /// Reads that went on elsewhere after a place had failed.
    pub failovers: u64,
    /// Reads that were asked for a second time because the first place was late.
    pub hedges: u64,
    /// Answers whose bytes were wrong.
    pub wrong_answers: u64,
    /// Reads that had to wait because no place was left.
    pub waits: u64,
    /// How long they waited, together, in milliseconds.
    pub waited_ms: u64,
    /// How long the longest of them waited, in milliseconds.
    pub longest_wait_ms: u64,
    /// How long the longest read took, waits and other places included, in milliseconds.
    pub longest_read_ms: u64,
    /// Reads that wait now.
    pub waiting: u64,
    /// For each place that cannot be used, why, for people.
    pub reasons: String,
    /// How long the longest of them could not be used, in milliseconds. A place that is only busy does not count.
    pub longest_away_ms: u64,
}

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Numbers of the versions that are gone.
    pub versions: Vec<u32>,
    /// Bytes given back. Zero while a publication is under way: the space follows when that ends. Objects stay also while a
    /// version is pinned that was removed before, and go with the next version that is written or removed after that, or with
    /// [`Store::reclaim_left`].
    pub freed_bytes: u64,
}

/// Keeps a version from being removed while it lives.
pub struct Pin(#[expect(dead_code, reason = "held only to be dropped")] Box<dyn Send + Sync>);

impl Pin {
    /// Wraps whatever holds the version: an open locked file, a lease.
    pub fn new(holder: impl Send + Sync + 'static) -> Self {
        Self(Box::new(holder))
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pin")
    }
}
