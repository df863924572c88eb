//! Bad servers, and a C program that finds out.
