//! The NBD server of `headwater export`: which disk each export is, and its TLS: which files, who must use it, and who may open
//! the disk.

use std::sync::Arc;

use anyhow::Context;
use headwater_block::Device;
use headwater_nbd::{
    Export, Exports, Limits, NamedExports, Options, Right, Server, ServerTls, ServerTlsOptions, SingleExport,
};

use crate::cli::{Demand, NbdArgs, NbdTlsArgs};
use crate::failure::invalid;

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
    /// Serves `devices`, one by each export, where that was asked for.
    pub fn serve(&self, source: &str, devices: &[Arc<dyn Device>]) -> anyhow::Result<Option<Running>> {
        let Some(address) = &self.nbd else { return Ok(None) };
        let devices = devices.to_vec();
        let exports: Arc<dyn Exports> = if self.nbd_export.is_empty() {
            let device = devices.into_iter().next().context("nothing to serve")?;
            match self.tls.tls_allow.as_slice() {
                [] => SingleExport::new(device, source),
                names if names.iter().any(|name| name.contains('=')) => {
                    return Err(invalid(
                        "--tls-allow NAME=EXPORT needs --nbd-export EXPORT: without it there is one disk, and --tls-allow NAME",
                    ));
                }
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

impl NbdTlsArgs {
    /// Reads the files, if TLS is asked for.
    pub fn load(&self) -> anyhow::Result<Option<ServerTls>> {
        let Some(directory) = &self.tls_certificates else { return Ok(None) };
        let options = ServerTlsOptions {
            is_required: self.tls == Demand::Required,
            // A name counts only if somebody vouches for it.
            verifies_clients: self.tls_verify_peer || !self.tls_allow.is_empty(),
        };
        ServerTls::load(directory, options).map(Some).context("cannot serve NBD with TLS")
    }
}
