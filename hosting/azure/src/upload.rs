//! Uploads a disk to a page blob: writes only the pages that differ from the blob's contents.
//!
//! ```text
//!   for each window of 4 MiB, several at a time:
//!     wanted = the bytes of the disk, or zeroes where it has no data
//!     there  = the pages that the blob has, read back, or zeroes in its holes
//!     write the pages that differ; clear those that must become zero
//!   then write the footer, and check the list of pages
//! ```
//!
//! So the same call continues an interrupted upload, and an upload over other contents gives the same blob. Nothing
//! is read back from a new blob.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;

use crate::blob::{PAGE_BYTES, PageBlob, WRITE_MAX_BYTES};
use crate::error::{AzureError, AzureErrorKind};

/// A gap of equal pages between two changed ranges is sent too if it is not longer than this, because an additional
/// request would cost more.
const GAP_BYTES: usize = 32 << 10;

const PAGE: usize = 512;

/// A disk to upload.
#[async_trait]
pub trait PageSource: Send + Sync {
    /// The first range at or after `from` that may contain bytes other than zero. Its ends need not be page
    /// boundaries.
    async fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>>;

    /// The bytes of a range of whole pages. Bytes beyond the end of the disk are zeroes.
    async fn read(&self, range: Range<u64>) -> io::Result<Bytes>;
}

/// The parameters of an upload.
#[derive(Clone, Debug)]
pub struct UploadOptions {
    /// The length of the disk in the blob, in bytes; a multiple of the page size. The footer follows.
    pub data_bytes: u64,
    /// The last page of the blob.
    pub footer: [u8; 512],
    /// An identifier of the disk's contents, such as the hash of a version. A blob with another identifier is
    /// refused.
    pub content: String,
    /// Whether the upload creates the blob. If not, the blob must exist, as a managed disk that waits for an upload.
    pub is_created: bool,
    /// The most windows at a time.
    pub in_flight: usize,
    /// Whether all pages are read back and compared at the end, in addition to Azure's MD5 check of each write.
    pub read_back: bool,
}

/// The result of an upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadReport {
    /// Bytes of pages that were written.
    pub sent_bytes: u64,
    /// Bytes of pages that the blob already had.
    pub kept_bytes: u64,
    /// Bytes of pages that the blob had and that were cleared.
    pub cleared_bytes: u64,
    /// Bytes of pages that the blob has at the end.
    pub stored_bytes: u64,
}

/// Makes the contents of the blob equal to the disk. `progress` gets the end of the last finished window, and the
/// length of the blob.
pub async fn upload(
    blob: &PageBlob,
    source: &dyn PageSource,
    options: &UploadOptions,
    progress: &(dyn Fn(u64, u64) + Send + Sync),
) -> Result<UploadReport, AzureError> {
    let total_bytes = options.data_bytes.saturating_add(PAGE_BYTES);
    if !options.data_bytes.is_multiple_of(PAGE_BYTES) || options.data_bytes == 0 {
        let why = format!(
            "cannot upload a disk of {} bytes: the size must be a multiple of 512, and not 0",
            options.data_bytes
        );
        return Err(AzureError::new(AzureErrorKind::Invalid, why));
    }
    let there = prepare(blob, options, total_bytes).await?;
    let work = Work { blob, source, there: &there, only_compares: false, counts: Counts::default() };
    progress(0, total_bytes);
    work.all(options, &|at| progress(at, total_bytes)).await?;
    // The footer is written last: a blob with a footer is a complete disk.
    work.bring(options.data_bytes, Bytes::copy_from_slice(&options.footer)).await?;
    let stored = blob.pages().await?;
    check(blob, source, &stored, options).await?;
    progress(total_bytes, total_bytes);
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Ok(UploadReport {
        sent_bytes: count(&work.counts.sent),
        kept_bytes: count(&work.counts.kept),
        cleared_bytes: count(&work.counts.cleared),
        stored_bytes: stored.iter().map(|pages| pages.end - pages.start).sum(),
    })
}

/// Creates or finds the blob, and lists its pages.
async fn prepare(
    blob: &PageBlob,
    options: &UploadOptions,
    total_bytes: u64,
) -> Result<Vec<Range<u64>>, AzureError> {
    if options.is_created {
        match blob.create(total_bytes, &options.content).await {
            Ok(()) => return Ok(Vec::new()),
            Err(error) if error.kind() == AzureErrorKind::Exists => {}
            Err(error) => return Err(error),
        }
    }
    let missing = || {
        let why = "there is no blob or disk at this URL";
        AzureError::new(AzureErrorKind::NotFound, why).advise("create the disk for the upload first")
    };
    let facts = blob.facts().await?.ok_or_else(missing)?;
    let other = |why: String| {
        let error = AzureError::new(AzureErrorKind::Exists, why);
        Err(error.advise("nothing was changed; name another blob, or remove this blob first"))
    };
    if !facts.has_pages {
        return other("the existing blob is not a page blob".to_owned());
    }
    if facts.len_bytes != total_bytes {
        return other(format!("the existing blob has {} bytes instead of {total_bytes}", facts.len_bytes));
    }
    if options.is_created && facts.content.as_ref() != Some(&options.content) {
        return other("the existing blob was created for another disk".to_owned());
    }
    blob.pages().await
}

/// Checks that the footer exists, and if requested compares all pages with the disk.
async fn check(
    blob: &PageBlob,
    source: &dyn PageSource,
    stored: &[Range<u64>],
    options: &UploadOptions,
) -> Result<(), AzureError> {
    let footer = options.data_bytes..options.data_bytes.saturating_add(PAGE_BYTES);
    if stored.last().is_none_or(|last| last.end != footer.end) {
        return Err(differs(footer.start));
    }
    if !options.read_back {
        return Ok(());
    }
    let work = Work { blob, source, there: stored, only_compares: true, counts: Counts::default() };
    work.all(options, &|_| {}).await?;
    work.bring(options.data_bytes, Bytes::copy_from_slice(&options.footer)).await
}

fn differs(at: u64) -> AzureError {
    let why = format!("the blob differs from the disk at byte {at} after the upload");
    AzureError::new(AzureErrorKind::Damaged, why)
        .advise("repeat the upload, and check whether another program writes to the blob")
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    kept: AtomicU64,
    cleared: AtomicU64,
}

/// One pass over the disk that writes or compares.
struct Work<'a> {
    blob: &'a PageBlob,
    source: &'a dyn PageSource,
    /// The pages that the blob had at the start.
    there: &'a [Range<u64>],
    /// If set, a difference is an error and is not written.
    only_compares: bool,
    counts: Counts,
}

impl Work<'_> {
    /// Processes all windows in which the disk or the blob has data.
    async fn all(
        &self,
        options: &UploadOptions,
        reached: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), AzureError> {
        // In order of the disk, so that everything before the reported position is finished.
        let mut working = FuturesOrdered::new();
        let mut next = Some(0);
        loop {
            while let Some(at) = next
                && working.len() < options.in_flight.max(1)
            {
                let found = self.next_window(at, options.data_bytes).await;
                next = found.as_ref().map(|(_, next)| *next);
                if let Some((window, _)) = found {
                    working.push_back(self.done(window?));
                }
            }
            match working.next().await {
                Some(end) => reached(end?),
                None => return Ok(()),
            }
        }
    }

    /// Processes a window, and returns its end.
    async fn done(&self, window: Range<u64>) -> Result<u64, AzureError> {
        let end = window.end;
        self.window(window).await?;
        Ok(end)
    }

    /// The next window at or after `at`, and the position at which the search continues.
    async fn next_window(&self, at: u64, data_bytes: u64) -> Option<(Result<Range<u64>, AzureError>, u64)> {
        let data = match self.source.next_data(at).await {
            Ok(data) => data.map(|data| data.start.max(at)),
            // After an error the search ends.
            Err(error) => return Some((Err(unread(at, &error)), data_bytes)),
        };
        let next = self.there.partition_point(|pages| pages.end <= at);
        let pages = self.there.get(next).map(|pages| pages.start.max(at));
        let first = [data, pages].into_iter().flatten().min().filter(|first| *first < data_bytes)?;
        let start = first - first % WRITE_MAX_BYTES;
        let end = start.saturating_add(WRITE_MAX_BYTES).min(data_bytes);
        Some((Ok(start..end), end))
    }

    async fn window(&self, window: Range<u64>) -> Result<(), AzureError> {
        let data = self.source.next_data(window.start).await;
        let has_data =
            data.map_err(|error| unread(window.start, &error))?.is_some_and(|data| data.start < window.end);
        let wanted = if has_data {
            self.source.read(window.clone()).await.map_err(|error| unread(window.start, &error))?
        } else {
            Bytes::from(vec![0; usize_of(window.end - window.start)])
        };
        self.bring(window.start, wanted).await
    }

    /// Makes the blob contain these bytes at this offset.
    async fn bring(&self, at: u64, wanted: Bytes) -> Result<(), AzureError> {
        let end = at.saturating_add(wanted.len() as u64);
        let there = self.read_back(at, end).await?;
        let found = changes(&wanted, there.as_deref());
        self.counts.kept.fetch_add(found.kept_bytes, Ordering::Relaxed);
        for change in found.changes {
            let start = at.saturating_add(change.start as u64);
            if self.only_compares {
                return Err(differs(start));
            }
            let bytes = wanted.slice(change.clone());
            let len = bytes.len() as u64;
            if is_zero(&bytes) {
                self.blob.clear(start..start.saturating_add(len)).await?;
                self.counts.cleared.fetch_add(len, Ordering::Relaxed);
            } else {
                self.blob.write(start, &bytes).await?;
                self.counts.sent.fetch_add(len, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// The blob's bytes in a window. `None`: the blob has no pages there.
    async fn read_back(&self, at: u64, end: u64) -> Result<Option<Vec<u8>>, AzureError> {
        let first = self.there.partition_point(|pages| pages.end <= at);
        let mut bytes = None;
        for pages in self.there.iter().skip(first).take_while(|pages| pages.start < end) {
            let pages = pages.start.max(at)..pages.end.min(end);
            let bytes = bytes.get_or_insert_with(|| vec![0; usize_of(end - at)]);
            let read = self.blob.read(pages.clone()).await?;
            if let Some(place) = bytes.get_mut(usize_of(pages.start - at)..usize_of(pages.end - at)) {
                place.copy_from_slice(&read);
            }
        }
        Ok(bytes)
    }
}

fn unread(at: u64, error: &io::Error) -> AzureError {
    AzureError::new(AzureErrorKind::Source, format!("cannot read the disk at byte {at}: {error}"))
}

/// A window has at most 4 MiB.
fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The changes that a window needs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Ranges of whole pages: each is either cleared or written.
    changes: Vec<Range<usize>>,
    /// Bytes of non-zero pages that are already right.
    kept_bytes: u64,
}

/// Compares pages. `there` is `None` if the blob has only zeroes.
fn changes(wanted: &[u8], there: Option<&[u8]>) -> Changes {
    let mut found = Changes::default();
    let mut last_is_zero = false;
    for (number, page) in wanted.chunks(PAGE).enumerate() {
        let start = number * PAGE;
        let page_is_zero = is_zero(page);
        let is_equal = match there {
            Some(there) => there.get(start..start + page.len()) == Some(page),
            None => page_is_zero,
        };
        if is_equal {
            found.kept_bytes += if page_is_zero { 0 } else { page.len() as u64 };
            continue;
        }
        let end = start + page.len();
        match found.changes.last_mut() {
            // Zero pages are cleared and others written, so a gap is closed only between two ranges of the same kind.
            Some(last) if last_is_zero == page_is_zero && start - last.end <= gap(page_is_zero) => {
                last.end = end
            }
            _ => found.changes.push(start..end),
        }
        last_is_zero = page_is_zero;
    }
    found
}

/// The longest gap that is written or cleared together with the ranges on both sides.
const fn gap(is_zero: bool) -> usize {
    if is_zero { 0 } else { GAP_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(text: &str) -> Vec<u8> {
        text.bytes().flat_map(|page| [if page == b'.' { 0 } else { page }; PAGE]).collect()
    }

    /// Ranges are counted in pages.
    fn found(wanted: &str, there: Option<&str>) -> (Vec<(usize, usize)>, u64) {
        let found = changes(&pages(wanted), there.map(pages).as_deref());
        let ranges = found.changes.iter().map(|range| (range.start / PAGE, range.end / PAGE)).collect();
        (ranges, found.kept_bytes / PAGE as u64)
    }

    #[test]
    fn only_pages_that_differ_are_changed() {
        assert_eq!(found("....", None), (vec![], 0));
        assert_eq!(found(".ab.", None), (vec![(1, 3)], 0));
        assert_eq!(found("abcd", Some("abxd")), (vec![(2, 3)], 3));
        // A short gap is sent; a long gap is not.
        assert_eq!(found("a..b", None), (vec![(0, 4)], 0));
        let long = format!("a{}b", ".".repeat(GAP_BYTES / PAGE + 1));
        assert_eq!(found(&long, None), (vec![(0, 1), (66, 67)], 0));
        // Only pages that become zero are cleared.
        assert_eq!(found("a..b", Some("axyb")), (vec![(1, 3)], 2));
        assert_eq!(found("c..d", Some("axyb")), (vec![(0, 1), (1, 3), (3, 4)], 0));
    }
}
