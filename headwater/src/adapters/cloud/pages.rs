//! Reads a version as a fixed VHD for an upload: the parts of the disk that have data, straight from the store.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::ImageVersion;
use headwater_azure::PageSource;
use headwater_azure::publish::VhdLayout;
use headwater_block::Device;
use headwater_filesystems::ReadAt;
use headwater_image::{ChunkCache, FixedVhd, VersionReader};
use headwater_service::backend::BackendError;
use headwater_store::Store;
use hyper::body::Bytes;

use crate::adapters::images::{hash_of, image_failed};

/// Memory for chunks of one upload.
const CHUNKS_BYTES: u64 = 64 << 20;

/// A version that is uploaded. While this exists, the version cannot be removed from the store.
pub struct VersionPages {
    reader: Arc<VersionReader>,
    vhd: FixedVhd,
}

impl VersionPages {
    /// Opens a version. Fails if it cannot be a fixed VHD.
    pub fn open(store: &dyn Store, version: &ImageVersion) -> Result<Self, BackendError> {
        let manifest = hash_of(version)?;
        let reader = VersionReader::open(store, manifest, ChunkCache::new(CHUNKS_BYTES));
        let reader = reader.map_err(image_failed)?;
        let outline = reader.outline();
        let vhd =
            FixedVhd::new(outline.size_bytes(), outline.sector_bytes(), manifest, version.created_at_ms);
        let vhd = vhd.map_err(image_failed)?;
        Ok(Self { reader, vhd })
    }

    /// The length and the footer of the VHD.
    pub fn layout(&self) -> VhdLayout {
        VhdLayout { data_bytes: self.vhd.data_bytes, footer: self.vhd.footer }
    }
}

#[async_trait]
impl PageSource for VersionPages {
    async fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let outline = self.reader.outline();
        let chunk_bytes = u64::from(outline.chunk_bytes());
        let mut index = from / chunk_bytes;
        while index < outline.chunks() {
            let (has_data, chunks) = outline.run_at(index);
            let end = index.saturating_add(chunks.max(1));
            if has_data {
                let start = from.max(index * chunk_bytes);
                return Ok(Some(start..(end * chunk_bytes).min(outline.size_bytes())));
            }
            index = end;
        }
        Ok(None)
    }

    async fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let device: Arc<dyn Device> = self.reader.clone();
        // Reads wait for the store, on a thread of their own.
        let read = tokio::task::spawn_blocking(move || {
            // These reads are not recorded in the boot trace.
            let device = Arc::clone(&device).unrecorded().unwrap_or(device);
            let len = usize::try_from(range.end.saturating_sub(range.start)).map_err(io::Error::other)?;
            let mut bytes = vec![0; len];
            let disk_bytes = device.geometry().size_bytes;
            let on_disk = range.end.min(disk_bytes).saturating_sub(range.start);
            let on_disk = usize::try_from(on_disk).map_err(io::Error::other)?;
            if let Some(part) = bytes.get_mut(..on_disk).filter(|part| !part.is_empty()) {
                device.read_at(range.start, part).map_err(io::Error::other)?;
            }
            Ok::<_, io::Error>(bytes)
        });
        let bytes = read.await.map_err(io::Error::other)??;
        Ok(bytes.into())
    }
}
