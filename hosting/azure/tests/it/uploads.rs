//! Tests complete and interrupted uploads against a plain copy of the disk.

use std::io;
use std::iter;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_azure::blob::{GivenUrl, SignedUrl, WRITE_MAX_BYTES};
use headwater_azure::{
    AzureError, AzureErrorKind, HostClock, HttpClient, Pacer, PacerOptions, PageBlob, PageSource,
    UploadOptions, UploadReport, upload,
};
use headwater_testkit::Rng;
use headwater_testkit_azure::blob::{BlobServer, Fault};
use hyper::Uri;

/// A disk in memory, with the ranges that may contain data.
struct Disk {
    bytes: Vec<u8>,
    data: Vec<Range<u64>>,
}

impl Disk {
    fn new(len: usize, data: &[Range<u64>], seed: u64) -> Self {
        let (mut bytes, mut rng) = (vec![0; len], Rng::new(seed));
        for range in data {
            rng.fill(&mut bytes[to_usize(range.start)..to_usize(range.end)]);
        }
        Self { bytes, data: data.to_vec() }
    }

    fn dense(len: u64, seed: u64) -> Self {
        Self::new(to_usize(len), &iter::once(0..len).collect::<Vec<_>>(), seed)
    }

    /// A disk of a few MiB with data in some ranges; some of the data is zeroes.
    fn random(rng: &mut Rng) -> Self {
        let len = (rng.between(1, 40) << 18) + rng.below(512);
        let (mut at, mut data) = (0, Vec::new());
        let mut bytes = vec![0; to_usize(len)];
        while at < len && data.len() < 12 {
            let start = (at + rng.below(3 << 20)).min(len);
            let end = (start + rng.between(1, 700_000)).min(len);
            if start < end {
                data.push(start..end);
                let filled = to_usize(start + rng.below(end - start))..to_usize(end);
                rng.fill(&mut bytes[filled]);
            }
            at = end + 1;
        }
        Self { bytes, data }
    }

    fn options(&self) -> UploadOptions {
        let data_bytes = (self.bytes.len() as u64).next_multiple_of(1 << 20);
        UploadOptions {
            data_bytes,
            footer: [0xf0; 512],
            content: "version-a".to_owned(),
            is_created: true,
            in_flight: 4,
            read_back: false,
        }
    }

    /// The expected contents of the blob.
    fn expected(&self) -> Vec<u8> {
        let options = self.options();
        let mut bytes = self.bytes.clone();
        bytes.resize(to_usize(options.data_bytes), 0);
        bytes.extend(options.footer);
        bytes
    }
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

#[async_trait]
impl PageSource for Disk {
    async fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        Ok(self.data.iter().find(|range| range.end > from).cloned())
    }

    async fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let mut bytes = vec![0; to_usize(range.end - range.start)];
        let there = to_usize(range.start).min(self.bytes.len())..to_usize(range.end).min(self.bytes.len());
        bytes[..there.len()].copy_from_slice(&self.bytes[there]);
        Ok(Bytes::from(bytes))
    }
}

fn blob_of(server: &BlobServer, attempts: u32) -> PageBlob {
    blob_with(attempts, Box::new(GivenUrl(server.signed(0).parse().unwrap())))
}

fn blob_with(attempts: u32, urls: Box<dyn SignedUrl>) -> PageBlob {
    let mut options = PacerOptions::new(7);
    options.first_wait = Duration::ZERO;
    options.attempts = attempts;
    PageBlob::new(
        HttpClient::new().unwrap(),
        Arc::new(Pacer::new(options, Arc::new(HostClock::start()))),
        urls,
    )
}

async fn run(server: &BlobServer, disk: &Disk) -> Result<UploadReport, AzureError> {
    upload(&blob_of(server, 4), disk, &disk.options(), &|_, _| {}).await
}

#[tokio::test]
async fn only_pages_with_data_are_sent_and_read_back_equal() {
    let server = BlobServer::start().await;
    // The second range is zeroes that count as data. The last range ends at the disk's end, which is not a page
    // boundary.
    let mut disk =
        Disk::new((40 << 20) + 300, &[0..700, (9 << 20)..(23 << 20), (40 << 20)..(40 << 20) + 300], 1);
    disk.bytes[9 << 20..22 << 20].fill(0);
    let told = Mutex::new(Vec::new());
    let mut options = disk.options();
    options.read_back = true;
    let tell = |done: u64, total: u64| told.lock().unwrap().push((done, total));
    let report = upload(&blob_of(&server, 4), &disk, &options, &tell).await.unwrap();
    assert!(server.blob().bytes() == disk.expected());
    let stored_bytes = 1024 + (1 << 20) + 512 + 512;
    assert_eq!(
        report,
        UploadReport { sent_bytes: stored_bytes, kept_bytes: 0, cleared_bytes: 0, stored_bytes }
    );
    assert_eq!(server.blob().writes(), 4);
    let told = told.into_inner().unwrap();
    assert!(told.is_sorted() && told.last() == Some(&(options.data_bytes + 512, options.data_bytes + 512)));
    // The footer is the last write.
    let seen = server.blob().seen.clone();
    let last = seen.iter().rfind(|seen| seen.method == "PUT").unwrap();
    assert_eq!(last.range, Some(format!("bytes={}-{}", options.data_bytes, options.data_bytes + 511)));
}

#[tokio::test]
async fn dense_disks_are_sent_in_writes_of_at_most_four_mebibytes() {
    let server = BlobServer::start().await;
    let disk = Disk::dense(13 << 20, 2);
    let report = run(&server, &disk).await.unwrap();
    assert_eq!(report.sent_bytes, (13 << 20) + 512);
    assert_eq!(server.blob().writes() as u64, (13u64 << 20).div_ceil(WRITE_MAX_BYTES) + 1);
    assert!(server.blob().bytes() == disk.expected());
}

/// Each request in turn is cut, before or after it is executed, and the upload is repeated. Then the blob equals the
/// disk, and a further upload sends nothing.
#[tokio::test]
async fn an_upload_cut_at_each_request_is_continued() {
    let disk = Disk::new((9 << 20) + 100, &[0..300_000, (5 << 20)..(6 << 20), (9 << 20)..(9 << 20) + 100], 3);
    let whole = BlobServer::start().await;
    run(&whole, &disk).await.unwrap();
    let requests = whole.blob().seen.len();
    assert!(requests >= 5, "{requests}");
    for cut in 0..requests {
        for fault in [Fault::CutBefore, Fault::CutAfter] {
            let server = BlobServer::start().await;
            server.blob().faults.insert(cut, fault);
            // One request at a time, so that no request is in flight when the upload ends.
            let mut options = disk.options();
            options.in_flight = 1;
            let error = upload(&blob_of(&server, 1), &disk, &options, &|_, _| {}).await.unwrap_err();
            assert_eq!(error.kind(), AzureErrorKind::Unknown, "{cut} {fault:?}: {error}");
            let sent = server.blob().pages.len() as u64 * 512;
            let report = run(&server, &disk).await.unwrap();
            assert!(server.blob().bytes() == disk.expected(), "{cut} {fault:?}");
            assert_eq!((report.kept_bytes, report.sent_bytes + sent), (sent, report.stored_bytes));
            let again = run(&server, &disk).await.unwrap();
            assert_eq!((again.sent_bytes, again.kept_bytes), (0, report.stored_bytes), "{cut} {fault:?}");
        }
    }
}

/// Uploads random disks over the remains of other uploads, with random faults.
#[tokio::test]
async fn a_blob_holds_the_last_disk_whatever_it_held_and_failed() {
    let mut rng = Rng::new(4);
    for round in 0..12 {
        let server = BlobServer::start().await;
        let disk = Disk::random(&mut rng);
        let mut before = Disk::random(&mut rng);
        before.bytes.resize(disk.bytes.len(), 0);
        before.data = iter::once(0..disk.bytes.len() as u64).collect();
        run(&server, &before).await.unwrap();
        let from = server.blob().seen.len();
        for number in from..from + 60 {
            let fault =
                [Fault::Status(500), Fault::Status(503), Fault::Throttled, Fault::CutBefore, Fault::CutAfter]
                    [rng.index(5)];
            if rng.chance(1, 4) {
                server.blob().faults.insert(number, fault);
            }
        }
        let mut options = disk.options();
        options.read_back = true;
        let report = upload(&blob_of(&server, 30), &disk, &options, &|_, _| {}).await.unwrap();
        assert!(server.blob().bytes() == disk.expected(), "round {round}: {report:?}");
    }
}

/// Provides a new signature at each call.
struct Renewed(String, Mutex<usize>);

#[async_trait]
impl SignedUrl for Renewed {
    async fn signed(&self, refused: Option<&Uri>) -> Result<Uri, AzureError> {
        let mut next = self.1.lock().unwrap();
        *next += usize::from(refused.is_some());
        Ok(format!("{}?sig={next}", self.0).parse().unwrap())
    }
}

#[tokio::test]
async fn an_expired_signature_is_replaced_or_reported() {
    let disk = Disk::dense(6 << 20, 5);
    for number in 0..4 {
        let server = BlobServer::start().await;
        server.blob().faults.insert(number, Fault::Expire);
        let blob = blob_with(3, Box::new(Renewed(server.url.clone(), Mutex::new(0))));
        upload(&blob, &disk, &disk.options(), &|_, _| {}).await.unwrap();
        assert!(server.blob().bytes() == disk.expected());
    }
    let server = BlobServer::start().await;
    server.blob().faults.insert(1, Fault::Expire);
    let error = run(&server, &disk).await.unwrap_err();
    assert_eq!(error.kind(), AzureErrorKind::Denied);
    assert!(error.to_string().contains("refuses the signature of http://127.0.0.1:"), "{error}");
    let shown = format!("{error} {error:?} {:?} {:?}", error.advice(), blob_of(&server, 1));
    assert!(shown.contains("expired") && !shown.contains("sig="), "{shown}");
}

#[tokio::test]
async fn a_blob_of_another_disk_is_left_alone() {
    let server = BlobServer::start().await;
    let disk = Disk::dense(2 << 20, 6);
    run(&server, &disk).await.unwrap();
    let before = server.blob().bytes();
    let writes = server.blob().writes();
    let other = |change: fn(&mut UploadOptions)| {
        let mut options = disk.options();
        change(&mut options);
        options
    };
    for (options, why) in [
        (other(|it| it.content = "version-b".to_owned()), "created for another disk"),
        (other(|it| it.data_bytes += 1 << 20), "has 2097664 bytes instead of 3146240"),
    ] {
        let error = upload(&blob_of(&server, 1), &disk, &options, &|_, _| {}).await.unwrap_err();
        assert!(error.kind() == AzureErrorKind::Exists && error.to_string().contains(why), "{error}");
    }
    server.blob().is_block_blob = true;
    let error = run(&server, &disk).await.unwrap_err();
    assert!(error.to_string().contains("not a page blob"), "{error}");
    assert!(server.blob().bytes() == before);
    assert_eq!(server.blob().writes(), writes);
    // A disk that waits for an upload is not created.
    let empty = BlobServer::start().await;
    let error =
        upload(&blob_of(&empty, 1), &disk, &other(|it| it.is_created = false), &|_, _| {}).await.unwrap_err();
    assert_eq!(error.kind(), AzureErrorKind::NotFound);
}

#[tokio::test]
async fn a_disk_that_cannot_be_read_has_no_footer() {
    struct Broken(Disk);
    #[async_trait]
    impl PageSource for Broken {
        async fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
            self.0.next_data(from).await
        }
        async fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
            if range.start > 0 {
                Err(io::Error::other("a chunk is damaged"))
            } else {
                self.0.read(range).await
            }
        }
    }
    let server = BlobServer::start().await;
    let disk = Broken(Disk::dense(9 << 20, 8));
    let error = upload(&blob_of(&server, 1), &disk, &disk.0.options(), &|_, _| {}).await.unwrap_err();
    assert!(
        error.kind() == AzureErrorKind::Source && error.to_string().contains("a chunk is damaged"),
        "{error}"
    );
    assert!(!server.blob().pages.contains_key(&(9 << 20)));
}
