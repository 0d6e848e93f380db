//! The static files of the console as `make console` built them, embedded in the program.

use std::sync::LazyLock;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// A file.
pub(super) struct Asset {
    /// Its path in URLs.
    pub(super) path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
    /// Its hash in quotes: the ETag with which a browser asks whether its copy is current.
    tag: LazyLock<String>,
}

macro_rules! asset {
    ($path:literal, $file:literal, $media_type:literal) => {
        Asset {
            path: $path,
            media_type: $media_type,
            bytes: include_bytes!(concat!("../../../../console/dist/", $file)),
            tag: LazyLock::new(|| {
                let bytes = include_bytes!(concat!("../../../../console/dist/", $file));
                format!("\"{}\"", blake3::hash(bytes).to_hex())
            }),
        }
    };
}

/// All files.
pub(super) static ALL: [Asset; 6] = [
    asset!("/", "index.html", "text/html; charset=utf-8"),
    asset!("/app.js", "app.js", "text/javascript; charset=utf-8"),
    asset!("/later.js", "later.js", "text/javascript; charset=utf-8"),
    asset!("/display.js", "display.js", "text/javascript; charset=utf-8"),
    asset!("/app.css", "app.css", "text/css; charset=utf-8"),
    asset!("/icon.svg", "icon.svg", "image/svg+xml"),
];

impl Asset {
    /// Answers with the file, or with 304 if the browser's copy is current.
    pub(super) fn answer(&self, headers: &HeaderMap) -> Response {
        let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let is_current = known.is_some_and(|tags| tags.split(',').any(|tag| tag.trim() == *self.tag));
        // Another release has other contents under the same names.
        let about = [(header::CACHE_CONTROL, "no-cache"), (header::ETAG, self.tag.as_str())];
        if is_current {
            return (StatusCode::NOT_MODIFIED, about).into_response();
        }
        (about, [(header::CONTENT_TYPE, self.media_type)], self.bytes).into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    /// What a browser with compression would load.
    fn gzip_bytes(bytes: &'static [u8]) -> usize {
        let mut gzip =
            Command::new("gzip").arg("-9").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = gzip.stdin.take().unwrap();
        let writing = std::thread::spawn(move || input.write_all(bytes));
        let packed = gzip.wait_with_output().unwrap().stdout.len();
        writing.join().unwrap().unwrap();
        packed
    }

    #[test]
    fn the_page_stays_within_its_budget() {
        let budget = [
            ("/", 2_000),
            ("/app.js", 60_000),
            ("/later.js", 26_000),
            ("/display.js", 70_000),
            ("/app.css", 12_000),
        ];
        for (path, most_bytes) in budget {
            let asset = ALL.iter().find(|asset| asset.path == path).unwrap();
            let size = gzip_bytes(asset.bytes);
            assert!(
                (1..=most_bytes).contains(&size),
                "{path} has {size} bytes packed, and may have {most_bytes}"
            );
        }
    }

    #[test]
    fn the_page_has_nothing_inline_and_nothing_of_others() {
        let page = std::str::from_utf8(ALL[0].bytes).unwrap();
        assert!(page.contains("src=\"/app.js\"") && page.contains("href=\"/app.css\""), "{page}");
        for refused in ["<style", "style=", "onload=", "onclick=", "http://", "https://"] {
            assert!(!page.contains(refused), "{refused} in {page}");
        }
    }
}
