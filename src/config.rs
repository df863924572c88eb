//! What the environment asks for, read once.
#![forbid(unsafe_code)]

use std::sync::OnceLock;

use crate::error::{Error, Kind};

/// The settings of this process.
#[derive(Clone, Debug)]
pub struct Config {
    /// `RPCRDMA_REDIRECT`: the stock transports that are moved, "tcp" and "udp" (each with its "6").
    pub redirect: Vec<String>,
    /// `RPCRDMA_REDIRECT_PROGRAMS`: the only programs that are moved; all if `None`.
    pub redirect_programs: Option<Vec<u32>>,
    /// `RPCRDMA_FALLBACK`: whether a moved client may go on over tcp.
    pub fallback: bool,
}

/// The settings.
///
/// # Errors
/// When a setting cannot be understood; the text names it.
pub fn get() -> Result<&'static Config, Error> {
    static CONFIG: OnceLock<Result<Config, Error>> = OnceLock::new();
    CONFIG.get_or_init(read).as_ref().map_err(Error::clone)
}

fn read() -> Result<Config, Error> {
    let words = |name: &str| -> Vec<String> {
        let value = std::env::var(name).unwrap_or_default();
        value.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let redirect = words("RPCRDMA_REDIRECT");
    if let Some(wrong) = redirect.iter().find(|word| !["tcp", "udp"].contains(&word.as_str())) {
        return Err(Error::new(
            Kind::Invalid,
            format!("RPCRDMA_REDIRECT: \"{wrong}\" is neither tcp nor udp"),
        ));
    }
    let programs = words("RPCRDMA_REDIRECT_PROGRAMS");
    let parsed: Result<Vec<u32>, _> = programs.iter().map(|word| word.parse()).collect();
    let parsed = parsed
        .map_err(|_| Error::new(Kind::Invalid, "RPCRDMA_REDIRECT_PROGRAMS: not a list of program numbers"))?;
    let redirect_programs = if parsed.is_empty() { None } else { Some(parsed) };
    let fallback = match std::env::var("RPCRDMA_FALLBACK").as_deref() {
        Ok("no") => false,
        Ok("yes") | Err(_) => true,
        Ok(other) => {
            return Err(Error::new(
                Kind::Invalid,
                format!("RPCRDMA_FALLBACK: \"{other}\" is neither yes nor no"),
            ));
        }
    };
    Ok(Config { redirect, redirect_programs, fallback })
}
