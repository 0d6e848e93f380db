//! The NBD server of `headwater export`: its options, and which disk each export is.

use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use headwater_block::Device;
use headwater_nbd::{Address, Export, Exports, Limits, NamedExports, Options, Right, Server, SingleExport};
use headwater_volume::Volume;

use crate::cmd::nbd_tls::NbdTlsArgs;
use crate::failure::invalid;

/// Options of `headwater export --nbd`.
#[derive(Debug, Args)]
pub struct NbdArgs {
    /// Where to listen for NBD clients: unix:PATH or tcp:HOST[:PORT]
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Option<Address>,
    /// The export's name, by which alone it is opened then [default: one that is opened by any name, or none]; given several
    /// times, each is another machine's, with a disk and a write cache of its own
    #[arg(long, value_name = "NAME", requires = "nbd", value_parser = export_name)]
    pub nbd_export: Vec<String>,
    /// TLS of the NBD server
    #[command(flatten)]
    pub tls: NbdTlsArgs,
}

/// A running server, and what it offers.
pub struct Running {
    server: Server,
    exports: Vec<String>,
}

impl Running {
    /// The URIs of the disks.
    pub fn uris(&self) -> Vec<String> {
        match self.exports.as_slice() {
            [] => vec![self.server.uri()],
            exports => exports.iter().map(|export| self.server.uri_of(export)).collect(),
        }
    }
}

impl NbdArgs {
    /// Serves `volumes`, one by each export, where that was asked for.
    pub fn serve(&self, source: &str, volumes: &[Arc<Volume>]) -> anyhow::Result<Option<Running>> {
        let Some(address) = &self.nbd else { return Ok(None) };
        let devices: Vec<_> = volumes.iter().map(|volume| Arc::clone(volume) as Arc<dyn Device>).collect();
        let exports: Arc<dyn Exports> = if self.nbd_export.is_empty() {
            let device = devices.into_iter().next().context("nothing to serve")?;
            match self.tls.tls_allow.as_slice() {
                [] => SingleExport::new(device, source),
                names => SingleExport::for_clients(device, source, names.to_vec()),
            }
        } else {
            let export = |device| Export { device, description: source.to_owned() };
            let exports = self.nbd_export.iter().cloned().zip(devices.into_iter().map(export));
            NamedExports::new(exports, self.rights()?)
        };
        let options = Options { limits: Limits::default(), tls: self.tls.load()? };
        let server = Server::bind(address.clone(), exports, options)
            .with_context(|| format!("cannot serve '{source}'"))?;
        Ok(Some(Running { server, exports: self.nbd_export.clone() }))
    }

    /// Whose certificate opens which export.
    fn rights(&self) -> anyhow::Result<Vec<Right>> {
        let is_served = |name: &str| {
            if self.nbd_export.iter().any(|export| export == name) {
                Ok(())
            } else {
                Err(format!("there is no --nbd-export {name}"))
            }
        };
        let read = |text: &String| {
            Right::parse(text, is_served).map_err(|why| invalid(format!("--tls-allow {text}: {why}")))
        };
        self.tls.tls_allow.iter().map(read).collect()
    }
}

/// A name that stands in a URI, and in a list of names, as it is.
fn export_name(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && !text.starts_with('.');
    if fits { Ok(text.to_owned()) } else { Err("1 to 63 letters, digits, '-', '_' and '.'".into()) }
}
