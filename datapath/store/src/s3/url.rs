//! The URL of a store in S3: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&style=path|host&timeout=SECONDS`.

use std::str::FromStr;
use std::time::Duration;

use crate::error::{StoreError, StoreErrorKind};

/// The timeout of one request, unless the URL has another one.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The most attempts for one request, including the first.
pub const REQUEST_ATTEMPTS: u32 = 5;
/// The pause before the second attempt; it doubles with each further attempt.
pub const REQUEST_PAUSE: Duration = Duration::from_millis(100);

/// A store's location in a bucket. Credentials are not part of it: they come from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Url {
    /// The bucket.
    pub bucket: String,
    /// The prefix of all keys, without slashes at its ends; may be empty.
    pub prefix: String,
    /// The URL of the server, such as `http://127.0.0.1:9000`; `None`: Amazon's.
    pub endpoint: Option<String>,
    /// The region, if it differs from that of the environment.
    pub region: Option<String>,
    /// Whether the bucket is part of the host name instead of the path.
    pub virtual_hosted: bool,
    /// The timeout of one request.
    pub timeout: Duration,
}

impl S3Url {
    /// Whether this text is meant to be such a URL.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with("s3://")
    }
}

impl FromStr for S3Url {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let invalid = |why: &str| {
            let shown = text.split('@').next_back().unwrap_or_default();
            StoreError::new(
                StoreErrorKind::Invalid,
                format!(
                    "'{shown}' is not the URL of a store in S3: {why}. It looks like \
                     s3://BUCKET/PREFIX?endpoint=https://HOST[:PORT]&region=NAME"
                ),
            )
        };
        let rest = text.strip_prefix("s3://").ok_or_else(|| invalid("it does not start with s3://"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        if bucket.contains('@') || bucket.contains(':') {
            let why = "keys and secrets do not belong in it: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Err(invalid(why));
        }
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if bucket.len() < 3 || bucket.len() > 63 || !bucket.chars().all(sound) {
            return Err(invalid("it names no bucket of 3 to 63 letters, digits, '.', '-' and '_'"));
        }
        let prefix = prefix.trim_matches('/');
        let sound_part = |part: &str| {
            !part.is_empty() && part != "." && part != ".." && part.chars().all(|c| sound(c) || c == '=')
        };
        if !prefix.is_empty() && !prefix.split('/').all(sound_part) {
            return Err(invalid(
                "its prefix may contain only letters, digits, '.', '-', '_', '=' and single '/', and no part '.' or '..'",
            ));
        }
        let mut url = Self {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: None,
            region: None,
            virtual_hosted: false,
            timeout: REQUEST_TIMEOUT,
        };
        for (name, value) in query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (name, value)
        }) {
            url.set(name, value).map_err(|why| invalid(&why))?;
        }
        Ok(url)
    }
}

impl S3Url {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "endpoint" => {
                let value = value.trim_end_matches('/');
                let host = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
                let sound = |c: char| {
                    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']' | '/')
                };
                if host
                    .is_none_or(|host| host.is_empty() || host.starts_with('/') || !host.chars().all(sound))
                {
                    return Err("its endpoint must be http://HOST[:PORT] or https://HOST[:PORT]".to_owned());
                }
                self.endpoint = Some(value.to_owned());
            }
            "region" if !value.is_empty() => self.region = Some(value.to_owned()),
            "style" if value == "path" => self.virtual_hosted = false,
            "style" if value == "host" => self.virtual_hosted = true,
            "timeout" => {
                let seconds = value.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
                self.timeout = Duration::from_secs(seconds.ok_or("its timeout must be 1 to 3600 seconds")?);
            }
            "region" | "style" => return Err(format!("'{value}' is not a valid {name}")),
            _ => {
                return Err(format!(
                    "it has the unknown parameter '{name}'; the parameters are endpoint, region, style and timeout"
                ));
            }
        }
        Ok(())
    }
}

/// The URL for messages: only bucket, prefix and endpoint. It does not parse back to the same [`S3Url`].
impl std::fmt::Display for S3Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        if !self.prefix.is_empty() {
            write!(f, "/{}", self.prefix)?;
        }
        if let Some(endpoint) = &self.endpoint {
            write!(f, "?endpoint={endpoint}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed_into_their_parts() {
        let url: S3Url =
            "s3://images/golden/a?endpoint=http://127.0.0.1:9000/&region=eu-1&timeout=5&style=host"
                .parse()
                .unwrap();
        assert_eq!((url.bucket.as_str(), url.prefix.as_str()), ("images", "golden/a"));
        assert_eq!(url.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(
            (url.region.as_deref(), url.timeout.as_secs(), url.virtual_hosted),
            (Some("eu-1"), 5, true)
        );
        assert_eq!(url.to_string(), "s3://images/golden/a?endpoint=http://127.0.0.1:9000");
        let url: S3Url = "s3://images".parse().unwrap();
        assert_eq!((url.prefix.as_str(), url.endpoint, url.timeout), ("", None, REQUEST_TIMEOUT));
        assert_eq!("s3://images/a/".parse::<S3Url>().unwrap().to_string(), "s3://images/a");
    }

    #[test]
    fn invalid_urls_are_refused_without_repeating_secrets() {
        for bad in [
            "s3://",
            "s3:///a",
            "s3://ab",
            "http://images",
            "s3://images/a//b",
            "s3://images/../b",
            "s3://images?endpoint=127.0.0.1:9000",
            "s3://images?endpoint=http://",
            "s3://images?endpoint=http:////",
            "s3://images?endpoint=http://a@b",
            "s3://images?timeout=0",
            "s3://images?timeout=x",
            "s3://images?style=odd",
            "s3://images?region=",
            "s3://images?secret=x",
        ] {
            let error = bad.parse::<S3Url>().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Invalid, "{bad}");
        }
        let error = "s3://key:secret@images".parse::<S3Url>().unwrap_err().to_string();
        assert!(!error.contains("secret@") && error.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
    }
}
