//! Splits the URL of an image on servers or in a bucket, as the source of `export` and `attach`, into store and image.
//! Other URLs are refused here, as sources of these commands and of `image import`, with what to do instead.

use headwater_api::{Problem, ProblemKind};
use headwater_nbd::NbdUri;
use headwater_store::S3Url;

use crate::failure::invalid;
use crate::stores;

/// The forms of a URL of an image.
const FORMS: &str = "https://HOST[:PORT][/BASE]/IMAGE (also http://) or s3://BUCKET[/PREFIX]/IMAGE";

/// Splits `https://HOST/BASE/IMAGE` into the value for `--from`, and the image. `None`: it is not a URL. Fails for a URL
/// of something else, or without an image.
pub fn split(source: &str) -> anyhow::Result<Option<(String, String)>> {
    let Some((scheme, rest)) = source.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
        return Ok(None);
    };
    if NbdUri::is_uri(source) {
        return Err(invalid(format!(
            "cannot use '{source}' as source of a disk: the data of another NBD server may change below a write cache; make an image of it \
             ('headwater image import URI --name IMAGE'), and export that"
        )));
    }
    let is_bucket = S3Url::is_meant(source);
    if !is_bucket && !stores::is_server(source) {
        return Err(invalid(format!(
            "cannot use '{source}' as source of a disk: headwater cannot read images from {scheme}://; name an image of the store, a file, or {FORMS}"
        )));
    }
    // The query, with the bucket's endpoint, comes after the image.
    let (place, query) = match rest.split_once('?') {
        Some((place, query)) if is_bucket => (place, format!("?{query}")),
        _ => (rest, String::new()),
    };
    match place.rsplit_once('/') {
        Some((store, image)) if !image.is_empty() => {
            Ok(Some((format!("{scheme}://{store}{query}"), image.to_owned())))
        }
        _ => Err(invalid(format!(
            "cannot use '{source}' as source of a disk: it names a store and no image in it; write {FORMS}"
        ))),
    }
}

/// Fails for a URL to import, unless it is a URI of an NBD server.
pub fn check_import(source: &str) -> Result<(), Problem> {
    let Some((scheme, _)) = source.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
        return Ok(());
    };
    if NbdUri::is_uri(source) {
        return Ok(());
    }
    let of_store = "'headwater image pull STORE IMAGE' brings versions of a store, and '--from STORE' of run, serve, export and \
                    attach reads them where they are";
    let advice = if S3Url::is_meant(source) {
        of_store.to_owned()
    } else if stores::is_server(source) {
        format!(
            "'curl URL | headwater image import - --name IMAGE' makes a version of a disk image; {of_store}"
        )
    } else {
        "write /path/to/disk.qcow2, nbd://HOST[:PORT]/NAME, nbds://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH".to_owned()
    };
    let why =
        format!("cannot import '{source}': files and NBD exports can be imported, but {scheme}:// cannot");
    Err(Problem::new(ProblemKind::Invalid, why).advise(advice))
}

/// Whether the text before `://` can be a scheme, and is not a part of a file name.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_store_and_an_image() {
        for (url, store, image) in [
            ("https://a/debian", "https://a", "debian"),
            ("http://127.0.0.1:8080/base/two/debian@3", "http://127.0.0.1:8080/base/two", "debian@3"),
            ("https://[::1]:8443/debian:test", "https://[::1]:8443", "debian:test"),
            ("https://a,https://b/base/debian", "https://a,https://b/base", "debian"),
            ("s3://bucket/debian", "s3://bucket", "debian"),
            (
                "s3://bucket/a/b/debian@3?endpoint=http://127.0.0.1:9000&region=x",
                "s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=x",
                "debian@3",
            ),
        ] {
            assert_eq!(split(url).unwrap(), Some((store.to_owned(), image.to_owned())), "{url}");
        }
        for no_url in
            ["debian@3", "debian:test", "/srv/disk.raw", "./http://a/b", "nbd:test", "null:1G", "dir/a://b"]
        {
            assert_eq!(split(no_url).unwrap(), None, "{no_url}");
        }
    }

    #[test]
    fn other_urls_are_refused_with_what_to_give() {
        for (url, words) in [
            ("https://a", "no image in it; write https://HOST"),
            ("https://a/", "no image in it"),
            ("s3://bucket?endpoint=http://a/b", "no image in it"),
            ("ftp://a/b", "from ftp://; name an image"),
            ("file:///srv/disk.raw", "a file, or https://"),
            ("nbd+unix:///?socket=/run/x", "image import URI"),
            ("nbd://a/b", "image import URI"),
        ] {
            let error = split(url).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(url), "{error}");
        }
    }

    #[test]
    fn what_is_imported_is_no_url_but_that_of_an_nbd_server() {
        for good in ["/srv/disk.raw", "disk.raw", "-", "./https://a/b", "nbd://a/b", "nbd+unix:///?socket=/x"]
        {
            check_import(good).unwrap();
        }
        for (url, words) in [
            ("https://a/debian.qcow2", "curl URL | headwater image import -"),
            ("http://a/debian", "image pull STORE IMAGE"),
            ("s3://bucket/debian", "--from STORE"),
            ("file:///srv/disk.raw", "write /path/to/disk.qcow2"),
        ] {
            let error = check_import(url).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(url), "{error}");
        }
    }
}
