//! Why a store cannot be served.

use std::path::PathBuf;

/// Why a store cannot be served.
#[derive(Debug)]
pub enum ServeError {
    /// A setting that is not allowed, and what to do.
    Invalid(String),
    /// An address that it cannot listen on.
    Listen {
        /// The address.
        on: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file that cannot be used.
    Io {
        /// What was tried, on what.
        tried: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A certificate or key that cannot be used.
    Tls {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
}

impl std::fmt::Display for ServeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Invalid(why) => f.write_str(why),
            Self::Listen { on, source } => write!(f, "cannot listen on {on}: {source}"),
            Self::Io { tried, source } => write!(f, "{tried}: {source}"),
            Self::Tls { file, why } => write!(f, "cannot use {} for TLS: {why}", file.display()),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Listen { source, .. } | Self::Io { source, .. } => Some(source),
            Self::Invalid(_) | Self::Tls { .. } => None,
        }
    }
}
