//! Uploads a fixed VHD to a blob, and prints how much was sent. The blob's URL with its signature is read from a
//! file. With STOP_AFTER_BYTES, the upload stops after that many bytes, as if the process were killed.
//!
//!     upload_vhd VHD URL_FILE [STOP_AFTER_BYTES]

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_azure::blob::GivenUrl;
use headwater_azure::{
    HostClock, HttpClient, Pacer, PacerOptions, PageBlob, PageSource, UploadOptions, upload,
};

/// A disk in a file; the file system knows its holes.
struct Vhd {
    file: File,
    data_bytes: u64,
}

#[async_trait]
impl PageSource for Vhd {
    async fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let offset = |found: rustix::io::Result<u64>| match found {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(io::Error::from(error)),
        };
        let Some(start) = offset(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(from)))? else {
            return Ok(None);
        };
        let end = offset(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(start)))?;
        let end = end.unwrap_or(self.data_bytes).min(self.data_bytes);
        Ok((start < end).then_some(start..end))
    }

    async fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, range.start)?;
        Ok(Bytes::from(bytes))
    }
}

async fn run(vhd: &Path, url: &Path, stop_after: u64) -> Result<String, Box<dyn std::error::Error>> {
    let mut file = File::open(vhd)?;
    let data_bytes = file.metadata()?.len() - 512;
    let mut footer = [0; 512];
    file.seek(SeekFrom::Start(data_bytes))?;
    file.read_exact(&mut footer)?;
    let options = UploadOptions {
        data_bytes,
        footer,
        content: "upload-vhd".to_owned(),
        is_created: true,
        in_flight: 8,
        read_back: true,
    };
    let mut pace = PacerOptions::new(1);
    pace.first_wait = Duration::from_millis(100);
    let url = std::fs::read_to_string(url)?.trim().parse()?;
    let blob = PageBlob::new(
        HttpClient::new()?,
        Arc::new(Pacer::new(pace, Arc::new(HostClock::start()))),
        Box::new(GivenUrl(url)),
    );
    let stop = |done: u64, _: u64| {
        if done >= stop_after {
            std::process::exit(9);
        }
    };
    let report = upload(&blob, &Vhd { file, data_bytes }, &options, &stop).await?;
    Ok(format!(
        "sent {} kept {} cleared {} stored {}",
        report.sent_bytes, report.kept_bytes, report.cleared_bytes, report.stored_bytes
    ))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (Some(vhd), Some(url)) = (arguments.first(), arguments.get(1)) else {
        return Err("usage: upload_vhd VHD URL_FILE [STOP_AFTER_BYTES]".into());
    };
    let stop_after = arguments.get(2).map_or(Ok(u64::MAX), |text| text.parse())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let said = runtime.block_on(run(Path::new(vhd), Path::new(url), stop_after))?;
    io::Write::write_all(&mut io::stdout(), format!("{said}\n").as_bytes())?;
    Ok(())
}
