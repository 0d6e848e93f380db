//! Options of `headwater scheme check`, which checks a cloud scheme: a description of how virtual machines are
//! created in Azure.
//!
//! It has nothing to do with the versioned settings of a catalog (`headwater catalog scheme`). The check itself is in
//! `headwater_sizes::scheme`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Subcommand, ValueHint};
use headwater_sizes::OsDiskPlace;
use headwater_sizes::scheme::{PageFile, Scheme, Scratch};

use crate::cli::complete;
use crate::cli::size::{ImageArgs, TableArgs, place};

/// `headwater scheme ...`.
#[derive(Debug, Subcommand)]
pub enum SchemeCommand {
    /// For the VM size of a scheme and each backup size, show where the OS disk would be, how much space remains there,
    /// and errors
    #[command(
        after_help = "FILE has the options as TOML keys without '--': size = \"Standard_D8ds_v5\", backup-size = [\"..\"], \
                            managed-disks = true, gallery = true, ephemeral = true, places = [\"temp\", \"nvme\"]. The command \
                            stores nothing and contacts no cloud: it does not check zones, region, capacity, quota and permissions. \
                            The exit code is 2 if the scheme is refused, and 3 if a size is unknown."
    )]
    Check(Box<CheckSchemeArgs>),
}

/// `headwater scheme check`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("scheme_options").multiple(true).conflicts_with("file"))]
pub struct CheckSchemeArgs {
    /// A TOML file with a scheme, instead of options
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// The image
    #[command(flatten)]
    pub image: ImageArgs,
    /// The scheme
    #[command(flatten)]
    pub scheme: SchemeArgs,
    /// Another table of sizes
    #[command(flatten)]
    pub table: TableArgs,
}

/// The options that describe a scheme.
#[derive(Debug, Args)]
pub struct SchemeArgs {
    /// The VM size, such as Standard_D8ds_v5
    #[arg(long, group = "scheme_options", required_unless_present = "file", add = complete::sizes())]
    size: Option<String>,
    /// A size to try if the cloud has none of the sizes before; may be given several times
    #[arg(long, group = "scheme_options", value_name = "SIZE", add = complete::sizes())]
    backup_size: Vec<String>,
    /// Disks are managed by the cloud
    #[arg(long, group = "scheme_options")]
    managed_disks: bool,
    /// Machines come from a version in an image gallery; needs --managed-disks
    #[arg(long, group = "scheme_options")]
    gallery: bool,
    /// The OS disk is on the host if possible, and then lost with it; needs --managed-disks and --gallery
    #[arg(long, group = "scheme_options")]
    ephemeral: bool,
    /// Where the OS disk may be, best place first [default: cache,temp,nvme,managed with --ephemeral, else managed]
    #[arg(long, group = "scheme_options", value_name = "PLACE,..", value_parser = place(), value_delimiter = ',')]
    places: Vec<OsDiskPlace>,
    /// The whole image is copied to the host; needs --ephemeral, and space for twice the OS disk
    #[arg(long, group = "scheme_options")]
    full_copy: bool,
    /// Machines boot with trusted launch, which takes 1 GiB beside the OS disk and needs generation 2
    #[arg(long, group = "scheme_options")]
    trusted_launch: bool,
    /// The zones in which machines are made: 1, 2, 3 [default: any]
    #[arg(long, group = "scheme_options", value_name = "ZONE,..", value_delimiter = ',')]
    zones: Vec<u8>,
    /// The place of the page file: temp, os or none [default: none]
    #[arg(long, group = "scheme_options", value_name = "PLACE", value_parser = page_file())]
    page_file: Option<PageFile>,
    /// The place of scratch space: temp or none [default: none]
    #[arg(long, group = "scheme_options", value_name = "PLACE", value_parser = scratch())]
    scratch: Option<Scratch>,
}

impl SchemeArgs {
    /// The scheme from the options.
    pub fn scheme(self) -> Scheme {
        Scheme {
            size: self.size.unwrap_or_default(),
            backup_size: self.backup_size,
            managed_disks: self.managed_disks,
            gallery: self.gallery,
            ephemeral: self.ephemeral,
            places: self.places,
            full_copy: self.full_copy,
            trusted_launch: self.trusted_launch,
            zones: self.zones,
            page_file: self.page_file.unwrap_or_default(),
            scratch: self.scratch.unwrap_or_default(),
        }
    }
}

fn page_file() -> impl TypedValueParser<Value = PageFile> {
    PossibleValuesParser::new(PageFile::WORDS).try_map(|word| PageFile::parse(&word))
}

fn scratch() -> impl TypedValueParser<Value = Scratch> {
    PossibleValuesParser::new(Scratch::WORDS).try_map(|word| Scratch::parse(&word))
}
